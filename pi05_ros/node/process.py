"""Runs nodes in a process of their own: two executors in two threads, signals, and an end that always comes."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import rclpy
from rclpy.context import Context
from rclpy.executors import ExternalShutdownException, ShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions

from pi05_ros.errors import ConfigurationError, Pi05Error
from pi05_ros.node.environment import apply_dds_defaults

# SIGINT and SIGTERM end the process within two seconds; what is not done by then (a model in the middle of its
# computation, a checkpoint being read) is cut off.
FORCED_END_S = 1.5
_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_SIGNAL_POLL_S = 1.0


class Spinner:
    """One single-threaded executor in a thread. An exception in a callback is logged and spinning goes on."""

    def __init__(self, name: str, context: Context | None = None) -> None:
        self._context = context or rclpy.get_default_context()
        self._executor = SingleThreadedExecutor(context=self._context)
        self._ending = False
        self._thread = threading.Thread(target=self._spin, name=name, daemon=True)

    def add(self, node: Node) -> None:
        self._executor.add_node(node)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; nodes can be destroyed afterwards."""
        self._ending = True
        self._executor.shutdown(timeout_sec=0.0)
        if self._thread.is_alive():
            self._thread.join()

    def _spin(self) -> None:
        while self._context.ok() and not self._ending:
            try:
                self._executor.spin()
            except (ExternalShutdownException, ShutdownException):
                return
            except Exception:
                if not self._ending and self._context.ok():
                    rclpy.logging.get_logger("executor").error(f"a callback failed:\n{traceback.format_exc()}")


class ManagedNode(Protocol):
    """What the policy node and the chunk player have in common; see `pi05_ros.node.policy_node.PolicyNode`."""

    inputs_node: Node

    def change_state(self, transition: str) -> bool: ...

    def shutdown(self) -> None: ...

    def destroy(self) -> None: ...

    def get_logger(self) -> Any: ...

    def get_fully_qualified_name(self) -> str: ...


class SpinningNodes:
    """Managed nodes with their two threads: one for all inputs, one for all lifecycles, parameters and statuses."""

    def __init__(self, nodes: Sequence[ManagedNode], context: Context | None = None) -> None:
        self._nodes = list(nodes)
        self._inputs = Spinner("inputs", context)
        self._control = Spinner("control", context)
        for node in self._nodes:
            self._inputs.add(node.inputs_node)
            self._control.add(cast(Node, node))
        self._inputs.start()
        self._control.start()

    def close(self) -> None:
        """Shut every node down, stop both threads, destroy the nodes."""
        # All at once: a model that is long in coming back must not keep another robot's node active.
        shutdowns = [threading.Thread(target=node.shutdown, daemon=True) for node in self._nodes]
        for thread in shutdowns:
            thread.start()
        for thread in shutdowns:
            thread.join()
        self._inputs.stop()
        self._control.stop()
        for node in self._nodes:
            node.destroy()


def add_node_arguments(parser: argparse.ArgumentParser, params_file: Path) -> None:
    """Declare the options that every node's sub-command has."""
    parser.add_argument(
        "--params-file",
        metavar="FILE",
        default=str(params_file),
        help="parameter file; the options above win over it (default: %(default)s)",
    )
    parser.add_argument("--namespace", default="", help="namespace of the node and its topics")
    parser.add_argument(
        "--autostart", action=argparse.BooleanOptionalAction, default=True, help="configure and activate at once"
    )
    parser.add_argument(
        "--ros-args", nargs=argparse.REMAINDER, default=[], metavar="...", help="passed to ROS: -r, -p, ..."
    )


def ros_command_line(name: str, options: argparse.Namespace) -> list[str]:
    """The command line for rclpy that the options of `add_node_arguments` stand for."""
    arguments = [name, "--ros-args", "--params-file", options.params_file]
    if options.namespace:
        arguments += ["-r", f"__ns:=/{options.namespace.strip('/')}"]
    return arguments + list(options.ros_args)


def run_process(
    make_nodes: Callable[[], Sequence[ManagedNode]], arguments: Sequence[str], *, autostart: bool = False
) -> int:
    """Run nodes until SIGINT or SIGTERM.

    Args:
        make_nodes: makes the nodes once rclpy is up.
        arguments: the command line, with its ``--ros-args``.
        autostart: configure and activate every node; a node that fails stays up, unconfigured, and says why.

    Returns:
        2 when a parameter or the environment cannot be used. After a signal the process ends here, with status 0.
    """
    block_signals()
    apply_dds_defaults()
    rclpy.init(args=list(arguments), signal_handler_options=SignalHandlerOptions.NO)
    try:
        nodes = make_nodes()
    except Pi05Error as error:
        print(f"{Path(arguments[0]).name}: {error}", file=sys.stderr)
        rclpy.try_shutdown()
        return 2
    spinning = SpinningNodes(nodes)
    for node in nodes:
        node.get_logger().info(f"{node.get_fully_qualified_name()} is up, process {os.getpid()}")
        if autostart:
            threading.Thread(target=_start, args=(node,), name="autostart", daemon=True).start()
    wait_for_signal()
    return _end(spinning)


def block_signals() -> None:
    """Leave SIGINT and SIGTERM to `wait_for_signal`, so that no handler meets half-done work; call it first of all.

    Threads started afterwards inherit this.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def wait_for_signal() -> None:
    """Sleep until SIGINT or SIGTERM, or until rclpy was shut down from elsewhere."""
    while signal.sigtimedwait(_SIGNALS, _SIGNAL_POLL_S) is None and rclpy.ok():
        pass


def _start(node: ManagedNode) -> None:
    for transition in ("configure", "activate"):
        if not node.change_state(transition):
            node.get_logger().error(f"autostart ends at {transition}; put it right and call the transition yourself")
            return


def _end(spinning: SpinningNodes) -> NoReturn:
    """Close, or stop trying after `FORCED_END_S`, and leave the process with status 0."""

    def close() -> None:
        spinning.close()
        rclpy.try_shutdown()

    closing = threading.Thread(target=close, name="end", daemon=True)
    closing.start()
    closing.join(FORCED_END_S)
    if closing.is_alive():
        rclpy.logging.get_logger("policy").warning(f"cut off after {FORCED_END_S:g} s: work was still going on")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: all that matters is closed, and taking torch's modules apart lasts longer than the rest of the end.
    os._exit(0)


def raise_priority(priority: int) -> None:
    """Run every thread of this process, the middleware's among them, with this SCHED_FIFO priority (1 to 98).

    Raises:
        ConfigurationError: ``config.realtime_priority`` without the right to.
    """
    try:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_FIFO, os.sched_param(priority))
    except PermissionError as error:
        raise ConfigurationError(
            "realtime_priority",
            f"realtime_priority {priority}: the right to SCHED_FIFO expected ({error}); give this user an rtprio of at "
            "least as much in /etc/security/limits.conf, or say 0",
        ) from error
