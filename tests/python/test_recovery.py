"""`ddp_run.live` against a control socket that the test plays. Every wait has a deadline."""
import gc
import os
import queue
import sys
import threading
import types
import unittest
import weakref
from unittest import mock

from test_package import PATIENCE_S, Worker

import ddp_run
from ddp_run import recovery


class Recovering(Worker):
    """`live`, and a launcher that may give the process a place in the next generation."""

    def setUp(self):
        super().setUp()
        self.enter(mock.patch.object(ddp_run, "CONFIRM_TIMEOUT_S", PATIENCE_S))
        self.enter(mock.patch.object(ddp_run, "ANSWER_TIMEOUT_S", PATIENCE_S))

    def start(self, train, save=None):
        """Calls `live` in a thread; gives its first connection, and a function that waits for its result or error."""
        results = queue.Queue()

        def run():
            try:
                results.put(ddp_run.live(train, save))
            except BaseException as error:
                results.put(error)

        threading.Thread(target=run, daemon=True).start()
        connection = self.accept()
        self.assertNotIn("outlives", connection.next())
        connection.say(type="assignment", protocol=1, generation=2, env={})
        return connection, lambda: results.get(timeout=PATIENCE_S)

    def accept_parked(self):
        connection = self.accept()
        place = {"local_rank": 3, "generation": 2, "pid": os.getpid()}
        self.assertEqual(connection.next(), {"type": "hello", "protocol": 1, "listens": True, "outlives": True, **place})
        return connection

    def assign(self, connection, generation):
        env = {"RANK": "5", "LOCAL_RANK": "7", "DDP_GENERATION": str(generation)}
        connection.say(type="assignment", protocol=1, generation=generation, env=env)

    def expect_error(self, error, kind, text):
        self.assertIsInstance(error, kind)
        self.assertRegex(str(error), text)

    def test_a_survivor_parks_and_takes_its_next_place(self):
        calls, updates = [], []

        def train(job):
            calls.append((ddp_run.generation(), os.environ.get("RANK"), os.environ["LOCAL_RANK"]))
            if len(calls) == 1:
                self.assertEqual(job.restore({}, finished=7), 7)
                job.step(lambda: updates.append(job))
                raise RuntimeError("connection closed by peer")
            # Ended and asked to stop was the generation before.
            self.assertFalse(ddp_run.stop_requested())
            ddp_run.check_generation()
            return job.restore({}, finished=0)

        first, result = self.start(train)
        self.assertEqual(first.next()["step"], 8)
        first.say(type="generation_over", generation=2, cause="rank 1 died of SIGKILL")
        parked = self.accept_parked()
        self.assertIsNone(first.next())
        self.assign(parked, 3)
        # It has the state that it had. Its local rank is that of the process.
        self.assertEqual((result(), len(updates)), (8, 1))
        self.assertEqual(calls, [(2, None, "0"), (3, "5", "0")])

    def test_what_a_function_had_captured_is_gone_before_the_process_parks(self):
        models = []

        def train(job):
            if models:
                return 5
            model = threading.Event()
            models.append(weakref.ref(model))

            def forward():
                raise RuntimeError(f"connection closed by peer of {model}")

            forward()

        first, result = self.start(train)
        first.say(type="generation_over", generation=2, cause="rank 1 died of SIGKILL")
        parked = self.accept_parked()
        gc.collect()
        self.assertIsNone(models[0]())
        self.assign(parked, 3)
        self.assertEqual(result(), 5)

    def test_a_failure_that_is_not_confirmed_stays_what_it_is(self):
        self.enter(mock.patch.object(ddp_run, "CONFIRM_TIMEOUT_S", 0.05))

        def train(job):
            raise RuntimeError("connection closed by peer")

        _, result = self.start(train)
        self.expect_error(result(), RuntimeError, "connection closed by peer")

    def test_an_error_of_its_own_is_raised_at_once(self):
        def train(job):
            raise KeyError("the script's own")

        _, result = self.start(train)
        self.expect_error(result(), KeyError, "the script's own")

    def test_lost_state_ends_the_process_though_the_generation_is_over(self):
        gate = threading.Event()

        def train(job):
            gate.wait(PATIENCE_S)
            ddp_run._launcher.over.wait(PATIENCE_S)
            raise ddp_run.StateLost("none of ranks [1, 3] has the state of step 5")

        connection, result = self.start(train)
        connection.say(type="generation_over", generation=2, cause="rank 1 died of SIGKILL")
        gate.set()
        self.expect_error(result(), ddp_run.StateLost, "none of ranks")

    def test_a_launcher_that_ends_while_a_process_is_parked_ends_it(self):
        def train(job):
            ddp_run._launcher.over.wait(PATIENCE_S)
            ddp_run.check_generation()

        connection, result = self.start(train)
        connection.say(type="generation_over", generation=2, cause="rank 1 died of SIGKILL")
        self.accept_parked().close()
        self.expect_error(result(), ddp_run.GenerationOver, "rank 1 died of SIGKILL")

    def test_an_assignment_that_is_none_ends_the_process(self):
        def train(job):
            ddp_run._launcher.over.wait(PATIENCE_S)
            ddp_run.check_generation()

        for env in ({"env": [1]}, {"env": {"RANK": 5}}, {}):
            with self.subTest(env=env):
                self.launcher = ddp_run._Launcher()
                self.enter(mock.patch.object(ddp_run, "_launcher", self.launcher))
                connection, result = self.start(train)
                connection.say(type="generation_over", generation=2, cause="rank 1 died of SIGKILL")
                self.accept_parked().say(type="assignment", protocol=1, generation=3, **env)
                self.expect_error(result(), ddp_run.GenerationOver, "rank 1 died of SIGKILL")

    def test_nodes_that_join_keep_the_process_and_a_signal_ends_it(self):
        for stay in True, False:
            with self.subTest(stay=stay):
                os.environ["DDP_GENERATION"] = "2"
                self.launcher = ddp_run._Launcher()
                self.enter(mock.patch.object(ddp_run, "_launcher", self.launcher))
                saved = []

                def train(job):
                    if ddp_run.generation() == 3:
                        return "in generation 3"
                    while True:
                        job.step(lambda: None)

                connection, result = self.start(train, lambda job: saved.append(job.finished))
                connection.say(type="stop_at_step_boundary", cause="a node joins", **({"stay": True} if stay else {}))
                if stay:
                    self.assign(self.accept_parked(), 3)
                    self.assertEqual(result(), "in generation 3")
                else:
                    self.assertEqual(result().code, 0)
                self.assertEqual(len(saved), 1)


class Deciding(unittest.TestCase):
    """With which state the ranks go on. A version is a generation and a step."""

    def decide(self, *held, peers=None, parts=None):
        """Of each rank its version, or also the one that it can finish; gives the version, and who gets it from whom."""
        whole = tuple(range(len(held)))
        reports = []
        for rank, versions in enumerate(held):
            version, unfinished = (versions, None) if versions is None or isinstance(versions[0], int) else versions
            named = [recovery._Version(*it) if it else None for it in (version, unfinished)]
            reports.append(recovery._Report(*named, parts[rank] if parts else None, peers[rank] if peers else whole))
        return recovery._decide(reports)

    def test_new_processes_get_the_newest_state_each_from_another_rank(self):
        self.assertEqual(self.decide((1, 5), (1, 5)), ((1, 5), {}))
        self.assertEqual(self.decide((1, 5), (0, 0), (1, 5), (0, 3)), ((1, 5), {1: 0, 3: 2}))
        self.assertEqual(self.decide((0, 0), (0, 0), (1, 5)), ((1, 5), {0: 2, 1: 2}))
        # They may see different checkpoints.
        self.assertEqual(self.decide((0, 0), (0, 3)), ((0, 3), {0: 1}))

    def test_a_step_that_any_rank_has_finished_is_finished_by_all_that_can(self):
        self.assertEqual(self.decide(((2, 5), (2, 6)), (2, 6), (2, 5)), ((2, 6), {2: 0}))
        self.assertEqual(self.decide(((2, 5), (2, 6)), ((2, 5), (2, 6)), (2, 5)), ((2, 5), {}))

    def test_a_later_generation_goes_before_a_later_step(self):
        """A node was cut off, and came back with steps that the others have made again, in a smaller world."""
        self.assertEqual(self.decide((1, 9), (2, 8), ((1, 8), (1, 9))), ((2, 8), {0: 1, 2: 1}))
        # The others are gone, but for a checkpoint.
        self.assertEqual(self.decide((1, 9), (0, 12), (0, 12)), ((0, 12), {0: 1}))
        self.assertEqual(self.decide((1, 9), (0, 7)), ((1, 9), {1: 0}))

    def test_a_rank_that_was_in_its_update_has_nothing(self):
        self.assertEqual(self.decide(None, (2, 6)), ((2, 6), {0: 1}))
        with self.assertRaisesRegex(ddp_run.StateLost, "in the middle of an update"):
            self.decide(None, None)

    def test_state_that_no_rank_of_a_group_has_is_lost(self):
        peers = [(0, 2), (1, 3)] * 2
        self.assertEqual(self.decide((2, 6), (2, 6), (0, 0), (0, 0), peers=peers), ((2, 6), {2: 0, 3: 1}))
        finished = [(2, 6), ((2, 5), (2, 6)), (0, 0), ((2, 5), (2, 6))]
        self.assertEqual(self.decide(*finished, peers=peers), ((2, 6), {2: 0}))
        with self.assertRaisesRegex(ddp_run.StateLost, r"none of ranks \[1, 3\] has the state of step 6"):
            self.decide((2, 6), (0, 0), (2, 6), (2, 5), peers=peers)

    def test_a_rank_whose_number_has_changed_has_another_part_of_the_state(self):
        peers = [(0, 2), (1, 3)] * 2
        # Ranks 0 and 3 died; 1 and 2, with parts 1 and 0, come first now.
        parts = [(1, 2), (0, 2), None, None]
        newest = self.decide((2, 6), (2, 6), (0, 0), (2, 6), peers=peers, parts=[(0, 2), (0, 2), None, (1, 2)])
        self.assertEqual(newest, ((2, 6), {1: 3, 2: 0}))
        with self.assertRaises(ddp_run.StateLost):
            self.decide((2, 6), (2, 6), (0, 0), (0, 0), peers=peers, parts=parts)
        # Three parts are not two.
        with self.assertRaises(ddp_run.StateLost):
            self.decide((2, 6), (2, 6), peers=[(0,), (1,)], parts=[(0, 3), (1, 3)])


class Committing(Worker):
    """No update without the gradients of all ranks."""

    def setUp(self):
        super().setUp()
        self.job, self.updates = ddp_run.LiveJob(), []
        self.job._block = types.SimpleNamespace(start=lambda: None, boundary=lambda *_: None)
        self.enter(mock.patch.object(recovery, "_has_peers", lambda: True))
        self.enter(mock.patch.object(recovery, "_synchronize", lambda: None))
        self.reports = [(0, 0), (0, 0)]
        dist = types.SimpleNamespace(
            get_world_size=lambda: 2,
            get_rank=lambda: 0,
            get_process_group_ranks=lambda group: [0, 1],
            all_gather_object=self.gather,
        )
        self.enter(mock.patch.dict(sys.modules, {"torch.distributed": dist}))

    def gather(self, reports, own):
        reports[:] = [own, recovery._Report(recovery._Version(*self.other), None, None, (0, 1))]

    def step(self, meet=lambda: None):
        with mock.patch.object(recovery, "_meet", meet):
            self.job.step(lambda: self.updates.append(self.job.finished))

    def break_off(self):
        def fail():
            raise RuntimeError("connection closed by peer")

        self.step()
        with self.assertRaises(RuntimeError):
            self.step(fail)
        self.assertEqual((self.job.finished, len(self.updates)), (1, 1))

    def test_a_step_that_was_broken_off_is_finished_if_another_rank_has_finished_it(self):
        for other, finished in (((2, 2), 2), ((2, 1), 1)):
            with self.subTest(other=other):
                self.setUp()
                self.break_off()
                self.other = other
                self.assertEqual((self.job.restore({}), len(self.updates)), (finished, finished))

    def test_gradients_of_a_step_that_was_broken_off_are_used_once(self):
        self.break_off()
        self.other = (2, 2)
        optimizer = types.SimpleNamespace(zero_grad=lambda: self.updates.append("no gradients"))
        self.job.restore({"optimizer": optimizer, "others": object()})
        self.assertEqual(self.updates[1:], [0, "no gradients"])

    def test_an_update_that_fails_leaves_no_state(self):
        sent = []
        with mock.patch.object(recovery, "_meet", lambda: None), self.assertRaises(ZeroDivisionError):
            self.job.step(lambda: 1 / 0)
        self.other = (0, 4)
        step = self.job.restore(lambda source, receivers: sent.append((source, receivers)))
        self.assertEqual((step, sent), (4, [(1, [0])]))


if __name__ == "__main__":
    unittest.main()
