"""The package `ddp_run` against a control socket that the test plays. Every wait has a deadline."""
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import unittest
from unittest import mock

from launched import PACKAGE_PATH

if PACKAGE_PATH:
    sys.path.insert(0, PACKAGE_PATH)

import ddp_run  # noqa: E402
from ddp_run import __main__ as program  # noqa: E402

PATIENCE_S = 60

FORKS = """
import os, ddp_run
ddp_run.heartbeat(1)
if child := os.fork():
    os.waitpid(child, 0)
    ddp_run.heartbeat(3)
else:
    ddp_run.heartbeat(2)
"""

RAISES = """
import ddp_run, sys
over = ddp_run.GenerationOver("rank 1 died of SIGKILL")
try:
    raise over
except ddp_run.GenerationOver:
    pass
try:
    raise RuntimeError("connection closed\\nby peer")
except RuntimeError as error:
    if sys.argv[1] == "own":
        raise
    raise over from (error if sys.argv[1] == "collective" else None)
"""


class Connection:
    """The launcher's end of one connection."""

    def __init__(self, accepted):
        accepted.settimeout(PATIENCE_S)
        self.socket, self.lines = accepted, accepted.makefile("rb")

    def next(self):
        """The next message; none at the end."""
        line = self.lines.readline()
        return json.loads(line) if line else None

    def say(self, **message):
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def close(self):
        self.lines.close()
        self.socket.close()


class Worker(unittest.TestCase):
    """A worker, local rank 3 of generation 2, and the control socket that it knows."""

    def setUp(self):
        name = f"ddp-test-{secrets.token_hex(8)}"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"\0{name}")
        self.listener.listen()
        self.listener.settimeout(PATIENCE_S)
        self.addCleanup(self.listener.close)
        place = {"DDP_CONTROL": f"@{name}", "DDP_GENERATION": "2", "LOCAL_RANK": "0", "DDP_LOCAL_RANK": "3"}
        self.enter(mock.patch.dict(os.environ, place))
        self.launcher = ddp_run._Launcher()
        self.enter(mock.patch.object(ddp_run, "_launcher", self.launcher))
        # Most of these launchers do not answer.
        self.enter(mock.patch.object(ddp_run, "ANSWER_TIMEOUT_S", 0.01))
        self.addCleanup(self.launcher._lose)

    def enter(self, context):
        context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)

    def accept(self):
        connection = Connection(self.listener.accept()[0])
        self.addCleanup(connection.close)
        return connection

    def accept_listening(self):
        """A connection of a worker that listens, after its greeting."""
        self.assertFalse(ddp_run.stop_requested())
        connection = self.accept()
        self.assertTrue(connection.next()["listens"])
        return connection

    def expect_event(self, event):
        self.assertTrue(event.wait(PATIENCE_S), "the message was not received")


class Sending(Worker):
    def test_the_greeting_names_the_place_and_heartbeats_follow(self):
        ddp_run.heartbeat(7)
        ddp_run.heartbeat(8, phase="saving")
        ddp_run.heartbeat(9, loss=2.5)
        # JSON has no NaN, and the launcher would end the connection.
        ddp_run.heartbeat(10, loss=float("nan"))
        ddp_run.sizes(ranks_divide=16, ranks_multiple_of=2)
        ddp_run.sizes()
        connection = self.accept()
        place = {"local_rank": 3, "generation": 2, "pid": os.getpid()}
        self.assertEqual(connection.next(), {"type": "hello", "protocol": 1, "listens": False, **place})
        self.assertEqual(connection.next(), {"type": "heartbeat", "step": 7, "phase": "training"})
        self.assertEqual(connection.next(), {"type": "heartbeat", "step": 8, "phase": "saving"})
        self.assertEqual(connection.next(), {"type": "heartbeat", "step": 9, "phase": "training", "loss": 2.5})
        self.assertEqual(connection.next(), {"type": "heartbeat", "step": 10, "phase": "training"})
        self.assertEqual(connection.next(), {"type": "sizes", "ranks_divide": 16, "ranks_multiple_of": 2})
        self.assertEqual(connection.next(), {"type": "sizes"})

    def test_what_the_launcher_would_skip_is_refused(self):
        for call in (
            lambda: ddp_run.heartbeat(1, "dreaming"),
            lambda: ddp_run.heartbeat(-1),
            lambda: ddp_run.sizes(ranks_divide=0),
        ):
            self.assertRaises(ValueError, call)

    def test_threads_write_whole_lines_in_one_connection(self):
        threads = [
            threading.Thread(target=lambda first=first: [ddp_run.heartbeat(first + n) for n in range(100)])
            for first in range(0, 800, 100)
        ]
        for thread in threads:
            thread.start()
        connection = self.accept()
        self.assertEqual(connection.next()["type"], "hello")
        self.assertEqual(sorted(connection.next()["step"] for _ in range(800)), list(range(800)))
        for thread in threads:
            thread.join(PATIENCE_S)

    def test_a_forked_child_speaks_for_itself(self):
        ddp_run.heartbeat(1)
        parent = self.accept()
        forks = subprocess.Popen([sys.executable, "-c", FORKS], env={**os.environ, "PYTHONPATH": PACKAGE_PATH})
        connections = [self.accept(), self.accept()]
        self.assertEqual(forks.wait(PATIENCE_S), 0)
        pids = {connection.next()["pid"] for connection in connections}
        self.assertEqual(len(pids), 2)
        steps = [[message["step"] for message in iter(connection.next, None)] for connection in connections]
        self.assertEqual(steps, [[1, 3], [2]])
        self.assertEqual(parent.next()["pid"], os.getpid())


class Listening(Worker):
    def test_the_first_question_replaces_a_connection_that_only_sends(self):
        ddp_run.heartbeat(1)
        sends = self.accept()
        self.accept_listening()
        self.assertEqual([sends.next()["type"], sends.next()["type"], sends.next()], ["hello", "heartbeat", None])
        ddp_run.heartbeat(2)
        self.assertFalse(self.launcher._is_lost)

    def test_a_request_to_stop(self):
        connection = self.accept_listening()
        connection.say(type="of a newer build")
        connection.say(type="stop_at_step_boundary", cause="SIGTERM")
        self.expect_event(self.launcher.asked_to_stop)
        self.assertTrue(ddp_run.stop_requested())

    def test_the_end_of_this_generation_and_not_of_an_earlier_one(self):
        connection = self.accept_listening()
        connection.say(type="generation_over", generation=1, cause="long ago")
        connection.say(type="generation_over", generation=2, cause="rank 5 (node `b`) died of SIGKILL")
        self.expect_event(self.launcher.over)
        with self.assertRaises(ddp_run.GenerationOver) as raised:
            ddp_run.check_generation()
        self.assertEqual(raised.exception.cause, "rank 5 (node `b`) died of SIGKILL")

    def test_a_launcher_that_asks_what_a_worker_does_gets_its_stacks(self):
        gate = threading.Event()
        thread = threading.Thread(target=lambda: gate.wait(PATIENCE_S), name="waits for the test")
        thread.start()
        connection = self.accept_listening()
        connection.say(type="describe")
        answer = connection.next()
        gate.set()
        thread.join(PATIENCE_S)
        self.assertEqual(answer["type"], "state")
        # The main thread first, its innermost call on top, with the place in the file.
        self.assertRegex(answer["text"], r"^thread MainThread\n  \S+ at .*:\d+: .*\n")
        self.assertIn(f"  {self._testMethodName} at {__file__}:", answer["text"])
        self.assertIn("thread waits for the test\n", answer["text"])


class Stopping(Worker):
    def ask_to_stop(self):
        connection = self.accept_listening()
        connection.say(type="stop_at_step_boundary", cause="SIGTERM")
        self.expect_event(self.launcher.asked_to_stop)
        return connection

    def test_at_a_boundary_it_saves_and_exits_with_0(self):
        connection, saved = self.ask_to_stop(), []
        with self.assertRaises(SystemExit) as left, ddp_run.stoppable(lambda: saved.append(9)) as boundary:
            try:
                boundary(9)
            except Exception:
                self.fail("the script caught what ends it")
            self.fail("the boundary was passed")
        self.assertEqual((left.exception.code, saved), (0, [9]))
        beats = [connection.next() for _ in range(2)]
        self.assertEqual([(beat["step"], beat["phase"]) for beat in beats], [(9, "training"), (9, "saving")])

    def test_it_waits_until_the_launcher_knows_that_it_listens(self):
        ddp_run.ANSWER_TIMEOUT_S, asked = PATIENCE_S, threading.Event()
        asking = threading.Thread(target=lambda: (ddp_run.stop_requested(), asked.set()), daemon=True)
        asking.start()
        connection = self.accept()
        self.assertTrue(connection.next()["listens"])
        self.assertFalse(asked.is_set())
        connection.say(type="assignment", protocol=1, generation=1, env={})
        self.expect_event(asked)

    def test_the_signal_that_follows_the_request_does_not_end_a_save(self):
        self.ask_to_stop()
        saved, before = [], {number: signal.getsignal(number) for number in ddp_run.STOP_SIGNALS}

        def save():
            for number in before:
                os.kill(os.getpid(), number)
                saved.append(number)

        with self.assertRaises(SystemExit), ddp_run.stoppable(save) as boundary:
            boundary(1)
        self.assertEqual(saved, list(before))
        self.assertEqual({number: signal.getsignal(number) for number in before}, before)

    def test_no_rank_leaves_before_all_agree(self):
        self.ask_to_stop()
        answers, asked, saved = [False, True], [], []

        def agree(own):
            asked.append(own)
            return answers.pop(0)

        with self.assertRaises(SystemExit), ddp_run.stoppable(lambda: saved.append(1), agree) as boundary:
            boundary(1)
            self.assertEqual(saved, [])
            boundary(2)
        self.assertEqual((asked, saved), ([True, True], [1]))

    def test_a_block_that_is_not_asked_to_stop_ends_as_it_would(self):
        with ddp_run.stoppable(self.fail) as boundary:
            boundary(1)
        with self.assertRaises(KeyError), ddp_run.stoppable(self.fail):
            raise KeyError("the script's own")

    def test_the_end_of_a_block_closes_the_connection_until_the_next_call(self):
        with ddp_run.stoppable(self.fail) as boundary:
            boundary(1)
        connection = self.accept()
        self.assertEqual([connection.next()["type"], connection.next()["step"], connection.next()], ["hello", 1, None])
        self.assertFalse(self.launcher._is_lost)
        ddp_run.heartbeat(2)
        connection = self.accept()
        self.assertFalse(connection.next()["listens"])
        self.assertEqual(connection.next()["step"], 2)
        self.accept_listening()

    def test_the_failure_of_a_peer_is_named_instead_of_what_it_broke(self):
        connection = self.accept_listening()
        connection.say(type="generation_over", generation=2, cause="rank 1 died of SIGKILL")
        with self.assertRaises(ddp_run.GenerationOver) as raised, ddp_run.stoppable(self.fail):
            raise RuntimeError("connection closed by peer")
        self.assertEqual(str(raised.exception), "rank 1 died of SIGKILL")
        self.assertEqual(str(raised.exception.__cause__), "connection closed by peer")

    def test_a_failure_of_its_own_stays_what_it_is(self):
        self.enter(mock.patch.object(ddp_run, "CAUSE_TIMEOUT_S", 0))
        with self.assertRaisesRegex(RuntimeError, "out of memory"), ddp_run.stoppable(self.fail):
            raise RuntimeError("out of memory")

    def test_a_script_that_does_not_catch_it_prints_one_line(self):
        for how, printed in {
            "boundary": "ddp_run.GenerationOver: rank 1 died of SIGKILL\n",
            "collective": "ddp_run.GenerationOver: rank 1 died of SIGKILL (here: RuntimeError: connection closed)\n",
            "own": "Traceback (most recent call last):\n",
        }.items():
            with self.subTest(how):
                script = subprocess.run(
                    [sys.executable, "-c", RAISES, how],
                    env={**os.environ, "PYTHONPATH": PACKAGE_PATH},
                    capture_output=True,
                    text=True,
                )
                self.assertEqual(script.returncode, 1)
                (self.assertIn if how == "own" else self.assertEqual)(printed, script.stderr)


class Store:
    """PyTorch's store, as far as ranks agree by it."""

    def __init__(self):
        self.values, self.lock, self.is_gone = {}, threading.Lock(), False

    def reach(self):
        if self.is_gone:
            raise RuntimeError("connection reset by the store")
        return self.lock

    def set(self, key, value):
        with self.reach():
            self.values[key] = value.encode()

    def get(self, key):
        with self.reach():
            return self.values[key]

    def check(self, keys):
        with self.reach():
            return all(key in self.values for key in keys)

    def add(self, key, number):
        with self.reach():
            self.values[key] = str(int(self.values.get(key, 0)) + number).encode()
            return int(self.values[key])


class Agreeing(Worker):
    """Ranks as threads. Between their boundaries they meet in collectives, which are barriers here."""

    STEPS = 10_000
    starts_with_the_block = False

    def setUp(self):
        super().setUp()
        self.store, self.here = Store(), threading.local()
        dist = types.SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: True,
            get_world_size=lambda: len(self.asked),
            get_rank=lambda: self.here.rank,
            TCPStore=type(None),
            # Wrapped twice, as PyTorch does. It has no collectives: a boundary must need none.
            distributed_c10d=types.SimpleNamespace(
                _get_default_store=lambda: types.SimpleNamespace(
                    underlying_store=types.SimpleNamespace(underlying_store=self.store)
                )
            ),
        )
        self.enter(mock.patch.dict(sys.modules, {"torch.distributed": dist}))
        self.enter(mock.patch.object(ddp_run, "LOOK_INTERVAL_S", 0.02))
        self.enter(mock.patch.object(ddp_run, "ANSWER_INTERVAL_S", 0.01))

    def run_ranks(self, *functions):
        """Runs a function for each rank, with its agreement and whether it was asked; gives what they return or raise."""
        self.asked = [threading.Event() for _ in functions]
        results = [None] * len(functions)

        def run(rank, function):
            self.here.rank = rank
            try:
                with ddp_run._Agreement(0, self.asked[rank]) as agreement:
                    if self.starts_with_the_block:
                        agreement.start()
                    results[rank] = function(agreement, self.asked[rank])
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=place, daemon=True) for place in enumerate(functions)]
        for thread in threads:
            thread.start()
        for rank, thread in enumerate(threads):
            thread.join(PATIENCE_S)
            self.assertFalse(thread.is_alive(), f"rank {rank} waits for ever")
        # None is left in the store's code when Python ends.
        self.assertEqual([thread.name for thread in threading.enumerate() if thread.name == "ddp_run stop"], [])
        return results

    def trains(self, collective, every=1, asked_at=None, steps=STEPS):
        """A rank with a collective in every so many steps, which its launcher asks at a step; gives where it stops."""

        def train(agreement, asked):
            for step in range(1, steps + 1):
                if step % every == 0:
                    collective.wait(PATIENCE_S)
                if step == asked_at:
                    asked.set()
                if agreement.stops_here(asked.is_set()):
                    return step
            return "ended"

        return train

    def test_all_ranks_stop_at_one_boundary_when_one_of_them_is_asked(self):
        for every in 1, 4:
            for rank in range(3):
                with self.subTest(every=every, asked=rank):
                    self.store.values.clear()
                    meet = threading.Barrier(3)
                    ranks = [self.trains(meet, every, asked_at=41 if rank == own else None) for own in range(3)]
                    steps = self.run_ranks(*ranks)
                    self.assertEqual(len(set(steps)), 1, steps)
                    self.assertIn(steps[0], range(41, self.STEPS), steps)

    def test_all_ranks_stop_at_the_next_boundary_when_all_are_asked_before_it(self):
        meet = threading.Barrier(3)
        self.assertEqual(self.run_ranks(*[self.trains(meet, asked_at=5)] * 3), [5, 5, 5])

    def test_ranks_that_learn_of_a_request_within_a_step_stop_at_its_end(self):
        def train(agreement, asked):
            self.assertFalse(agreement.stops_here(False))
            if self.here.rank == 1:
                asked.set()
            self.assertTrue(agreement._known.wait(PATIENCE_S))
            return agreement.stops_here(asked.is_set())

        self.assertEqual(self.run_ranks(train, train), [True, True])

    def test_a_rank_in_a_long_first_step_answers(self):
        self.starts_with_the_block, stopping = True, threading.Event()

        def asked_at_once(agreement, asked):
            stops = agreement.stops_here(True)
            stopping.set()
            return stops

        def in_its_first_step(agreement, asked):
            self.assertTrue(stopping.wait(PATIENCE_S))
            return agreement.stops_here(False)

        self.assertEqual(self.run_ranks(asked_at_once, in_its_first_step), [True, True])

    def test_a_boundary_waits_for_no_rank(self):
        far = threading.Event()

        def ahead(agreement, asked):
            stopped = any(agreement.stops_here(False) for _ in range(100))
            far.set()
            return stopped

        def behind(agreement, asked):
            self.assertTrue(far.wait(PATIENCE_S))
            return any(agreement.stops_here(False) for _ in range(100))

        self.assertEqual(self.run_ranks(ahead, behind), [False, False])

    def test_no_rank_waits_for_one_whose_steps_are_over(self):
        for late in 0, 1:
            with self.subTest(late=late):
                self.store.values.clear()
                others_end = threading.Event()

                def ends(agreement, asked):
                    self.assertFalse(agreement.stops_here(False))
                    self.assertFalse(agreement.stops_here(False))
                    agreement.__exit__(None, None, None)
                    others_end.set()

                def is_asked_before_its_last_step(agreement, asked):
                    self.assertFalse(agreement.stops_here(False))
                    self.assertTrue(others_end.wait(PATIENCE_S))
                    asked.set()
                    return agreement.stops_here(True)

                ranks = [ends, ends]
                ranks[late] = is_asked_before_its_last_step
                self.assertEqual(self.run_ranks(*ranks)[late], False)

    def test_the_rank_that_does_not_answer_is_named(self):
        self.enter(mock.patch.object(ddp_run, "AGREEMENT_TIMEOUT_S", 0.1))
        first = self.trains(None, every=self.STEPS + 1, asked_at=1)
        failed, _, late = self.run_ranks(first, self.trains(None, every=self.STEPS + 1, asked_at=1), lambda *_: None)
        self.assertIsNone(late)
        self.assertRegex(str(failed), r"^waited 0 s for ranks \[2\] to say at which step they can stop$")

    def test_a_store_that_does_not_answer_is_named(self):
        """Its host is stopped, or cut off: a call waits without end, and holds a lock of PyTorch's."""
        self.enter(mock.patch.object(ddp_run, "AGREEMENT_TIMEOUT_S", 0.1))
        thaw, both, check = threading.Event(), threading.Barrier(2), self.store.check
        self.store.check = lambda keys: thaw.wait(PATIENCE_S) and check(keys)

        def train(agreement, asked):
            try:
                return agreement.stops_here(True)
            finally:
                both.wait(PATIENCE_S)
                thaw.set()

        for error in self.run_ranks(train, train):
            self.assertEqual(str(error), "waited 0 s for an answer of PyTorch's store")

    def test_ranks_save_at_no_step_if_one_leaves_by_an_interrupt_or_a_code(self):
        for kind in KeyboardInterrupt, SystemExit:
            with self.subTest(kind=kind):
                self.enter(mock.patch.object(ddp_run, "AGREEMENT_TIMEOUT_S", 0.5))
                self.store.values.clear()
                has_left = threading.Event()

                def leaves(agreement, asked):
                    self.assertFalse(agreement.stops_here(False))
                    agreement.__exit__(kind, kind(1), None)
                    has_left.set()

                def is_asked(agreement, asked):
                    self.assertTrue(has_left.wait(PATIENCE_S))
                    return agreement.stops_here(True)

                _, waits = self.run_ranks(leaves, is_asked)
                self.assertRegex(str(waits), r"^waited 0 s for ranks \[0\] ")

    def test_a_rank_that_waits_learns_that_the_generation_is_over(self):
        connection = self.accept_listening()

        def dies(agreement, asked):
            connection.say(type="generation_over", generation=2, cause="rank 1 died of SIGKILL")
            raise RuntimeError("killed")

        waits, _ = self.run_ranks(self.trains(None, every=self.STEPS + 1, asked_at=1), dies)
        self.assertEqual(str(waits), "rank 1 died of SIGKILL")

    def test_a_store_that_is_gone_ends_only_a_rank_that_has_to_stop(self):
        def train(agreement, asked):
            self.assertFalse(agreement.stops_here(False))
            self.store.is_gone = True
            agreement._thread.join(PATIENCE_S)
            self.assertFalse(agreement.stops_here(False))
            return agreement.stops_here(self.here.rank == 1)

        self.assertEqual([str(result) for result in self.run_ranks(train, train)], ["False", "connection reset by the store"])

    def test_rank_0_stays_until_all_others_know_where_to_stop(self):
        """It may host the store."""
        others_know = threading.Event()

        def rank_0(agreement, asked):
            stops = agreement.stops_here(True)
            agreement._thread.join(0.1)
            stays = agreement._thread.is_alive()
            others_know.set()
            return stops, stays

        def rank_1(agreement, asked):
            self.store.set("ddp_run/stop/2/0/limit/1", "1")
            self.assertTrue(others_know.wait(PATIENCE_S))
            return self.store.add("ddp_run/stop/2/0/done", 1)

        self.assertEqual(self.run_ranks(rank_0, rank_1), [(True, True), 2])

    def test_without_collectives_or_alone_a_rank_decides_for_itself(self):
        self.assertEqual(self.run_ranks(self.trains(None, every=self.STEPS + 1, asked_at=7)), [7])
        self.assertEqual(self.store.values, {})
        sys.modules["torch.distributed"].is_initialized = lambda: False
        self.assertEqual(self.run_ranks(self.trains(None, every=self.STEPS + 1, asked_at=7), lambda *_: None), [7, None])


class WithoutLauncher(Worker):
    def expect_nothing(self):
        """Every call, as often as a script may make it."""
        for step in range(100):
            ddp_run.heartbeat(step)
            ddp_run.check_generation()
        ddp_run.sizes(ranks_divide=4)
        self.assertFalse(ddp_run.stop_requested())
        with self.assertRaises(RuntimeError), ddp_run.stoppable(self.fail) as boundary:
            boundary(1)
            raise RuntimeError("does not wait for a cause")

    def test_nothing_happens_outside_of_ddp_run(self):
        del os.environ["DDP_CONTROL"], os.environ["DDP_GENERATION"]
        self.enter(mock.patch.object(ddp_run, "_launcher", ddp_run._Launcher()))
        threads = threading.active_count()
        self.expect_nothing()
        self.assertEqual((ddp_run.generation(), threading.active_count()), (1, threads))

    def test_a_launcher_that_was_never_there(self):
        self.listener.close()
        self.expect_nothing()

    def test_a_launcher_that_is_gone(self):
        connection = self.accept_listening()
        connection.close()
        self.expect_event(self.launcher.over)
        self.expect_nothing()

    def test_a_launcher_that_reads_nothing_does_not_hold_up_the_script(self):
        self.enter(mock.patch.object(ddp_run, "SEND_TIMEOUT_S", 1))
        for step in range(1_000_000):
            ddp_run.heartbeat(step)
            if self.launcher._is_lost:
                break
        self.assertTrue(self.launcher._is_lost)
        self.expect_nothing()

    def test_a_line_without_end_ends_the_connection(self):
        connection = self.accept_listening()
        sent = 0
        with self.assertRaises(OSError):
            while sent < 4 * ddp_run.MAX_LINE_BYTES:
                sent += connection.socket.send(b"x" * 65536)
        self.expect_event(self.launcher.over)
        self.expect_nothing()

    def test_what_is_no_message_ends_the_connection_or_is_skipped(self):
        connection = self.accept_listening()
        connection.socket.sendall(b'[1]\n"x"\n{}\n{"type":["describe"]}\n')
        connection.say(type="describe")
        self.assertEqual(connection.next()["type"], "state")
        connection.socket.sendall(b"[" * 100_000 + b"\n")
        self.expect_event(self.launcher.over)
        self.expect_nothing()


class Program(unittest.TestCase):
    def test_the_program_of_this_environment_comes_before_the_one_in_the_path(self):
        def which(name, path=None):
            return f"{path or 'PATH'}/{name}"

        with mock.patch("shutil.which", which):
            self.assertEqual(program.find(), f"{os.pathsep.join(program._folders())}/ddp-run")
        with mock.patch("shutil.which", lambda name, path=None: None if path else f"PATH/{name}"):
            self.assertEqual(program.find(), "PATH/ddp-run")

    def test_a_missing_program_is_named_with_the_remedy(self):
        with mock.patch.object(program, "find", lambda: None), mock.patch("sys.stderr") as stderr:
            with self.assertRaises(SystemExit) as left:
                program.main()
        self.assertEqual(left.exception.code, 127)
        self.assertIn("install the wheel of ddp-run", stderr.write.call_args.args[0])


if __name__ == "__main__":
    unittest.main()
