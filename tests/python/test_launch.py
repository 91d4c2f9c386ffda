"""`ddp_run.elastic_launch` and `record` under the real `ddp-run`, without PyTorch."""
import enum
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest
from unittest import mock

from launched import DDP_RUN, PACKAGE_PATH, PATIENCE_S

if PACKAGE_PATH:
    sys.path.insert(0, PACKAGE_PATH)
import ddp_run
from ddp_run import functions, launch

UNCHANGED = """
import sys
before = [sys.excepthook, list(sys.meta_path), list(sys.path), sys.argv, sys.displayhook]
import ddp_run
assert before == [sys.excepthook, list(sys.meta_path), list(sys.path), sys.argv, sys.displayhook]
assert "ddp_run.launch" not in sys.modules
"""


def is_running(pid):
    """False of a zombie too: a container may have nothing that reaps it."""
    try:
        with open(f"/proc/{pid}/stat") as text:
            return text.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def place(first, second):
    return int(os.environ["RANK"]), first, second


def fails_once(marker):
    """The first generation also has a result, of rank 0."""
    if os.environ["RANK"] == "1" and ddp_run.generation() == 1:
        while not list(pathlib.Path(marker).parent.glob("ddp_run-*/result-1-0")):
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    return ddp_run.generation()


def listens():
    """A rank that the launcher refuses waits for its answer in vain."""
    ddp_run.stop_requested()
    return ddp_run._launcher._answered.is_set() and not ddp_run._launcher._is_lost


def leaves_a_child(file):
    child = subprocess.Popen(["sleep", "100"])
    with open(f"{file}-{os.environ['RANK']}", "w") as target:
        target.write(str(child.pid))


def fails(_):
    if os.environ["RANK"] == "1":
        raise ValueError("no data")
    signal.pause()


class Launch(unittest.TestCase):
    def setUp(self):
        self.enter(mock.patch.object(launch, "find", lambda: DDP_RUN))
        folder = self.enter(tempfile.TemporaryDirectory())
        self.enter(mock.patch.object(tempfile, "tempdir", folder))
        # The workers import this file.
        self.enter(mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(filter(None, [*sys.path]))}))

    def enter(self, context):
        value = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return value

    def config(self, **fields):
        return ddp_run.LaunchConfig(1, 1, 2, **{"max_restarts": 0, **fields})

    def test_a_function_returns_its_results_by_rank(self):
        for method in ("spawn", "fork"):
            with self.subTest(method):
                results = ddp_run.elastic_launch(self.config(start_method=method), place)("a", "${local_rank}/$$")
                self.assertEqual(results, {0: (0, "a", "0/$"), 1: (1, "a", "1/$")})

    def test_a_fork_has_what_no_pickle_can_carry(self):
        value, lines = 5, []
        with mock.patch.object(sys, "stdout", mock.Mock(write=lines.append)):
            results = ddp_run.elastic_launch(self.config(start_method="fork"), lambda: print("seen") or value)()
        self.assertEqual(results, {0: 5, 1: 5})
        # A notebook's stream gets the output.
        self.assertEqual(sorted(lines), ["[0] seen\n", "[1] seen\n"])

    def test_a_program_has_no_results(self):
        results = ddp_run.elastic_launch(self.config(), sys.executable)("-u", "-c", "pass")
        self.assertEqual(results, {0: None, 1: None})

    def test_results_are_those_of_the_last_generation(self):
        for method in ("spawn", "fork"):
            with self.subTest(method), tempfile.TemporaryDirectory(dir=tempfile.tempdir) as folder:
                with mock.patch.object(tempfile, "tempdir", folder):
                    config = self.config(start_method=method, max_restarts=1)
                    results = ddp_run.elastic_launch(config, fails_once)(os.path.join(folder, "marker"))
                self.assertEqual(results, {0: 2, 1: 2})

    def test_the_launcher_takes_connections_of_a_fork(self):
        results = ddp_run.elastic_launch(self.config(start_method="fork"), listens)()
        self.assertEqual(results, {0: True, 1: True})

    def test_a_worker_leaves_nothing_behind(self):
        for method in ("spawn", "fork"):
            with self.subTest(method):
                file = os.path.join(tempfile.gettempdir(), f"child-of-{method}")
                ddp_run.elastic_launch(self.config(start_method=method), leaves_a_child)(file)
                for rank in range(2):
                    with open(f"{file}-{rank}") as text:
                        child = int(text.read())
                    end = time.monotonic() + PATIENCE_S
                    while is_running(child) and time.monotonic() < end:
                        time.sleep(0.05)
                    self.assertFalse(is_running(child))

    def test_what_ddp_run_ended_is_no_failure(self):
        events = [
            {"event": "worker_started", "generation": 1, "rank": 0, "local_rank": 0, "pid": 7},
            {"event": "worker_ended", "generation": 1, "local_rank": 0, "ending": "terminated by ddp-run (SIGTERM)"},
            {"event": "finished", "report": "rank 1 failed \u2028"},
        ]
        folder = pathlib.Path(tempfile.gettempdir())
        text = "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in events)
        (folder / "events").write_text(text + '{"event": "cut o')
        ranks, failure, report = launch._outcome(folder, 1)
        self.assertEqual((ranks, failure.rank, failure.local_rank, failure.exit_code), ([0], -1, -1, 1))
        self.assertEqual(report, "rank 1 failed \u2028")

    def test_a_failure_names_the_rank_and_its_exception(self):
        for method in ("spawn", "fork"):
            with self.subTest(method), self.assertRaises(ddp_run.LaunchFailed) as raised:
                ddp_run.elastic_launch(self.config(start_method=method), fails)("x")
            failure = raised.exception.failure
            self.assertEqual((failure.rank, failure.local_rank, failure.exit_code), (1, 1, 1))
            with open(failure.error_file) as file:
                self.assertEqual(json.load(file)["message"]["message"], "ValueError: no data")

    def test_a_job_that_cannot_start_says_so(self):
        with self.assertRaises(ddp_run.LaunchFailed) as raised:
            ddp_run.elastic_launch(self.config(role="\n"), "true")()
        self.assertEqual((raised.exception.exit_code, raised.exception.failure), (2, None))


class Configuration(unittest.TestCase):
    def words(self, **fields):
        needed = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "max_restarts": 0}
        return " ".join(launch.flags(ddp_run.LaunchConfig(**{**needed, **fields})))

    def test_it_becomes_flags(self):
        always = "--nproc-per-node 2 --max-restarts 0 --role default_role --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT"
        first, _, rest = always.partition(" --role")
        self.assertEqual(self.words(), f"--nnodes 1:1 {always}")
        several = self.words(max_nodes=3, rdzv_endpoint="a:1", run_id="j", rdzv_configs={"rank": 2, "timeout": 900})
        self.assertEqual(several, f"--nnodes 1:3 {first} --rdzv-id j --role{rest} --rdzv-endpoint a:1")
        static = self.words(max_nodes=2, rdzv_backend="static", rdzv_endpoint="a:1", rdzv_configs={"rank": 1, "is_host": 0})
        self.assertTrue(static.endswith("--rdzv-conf is_host=0 --rdzv-endpoint a:1 --node-rank 1"), static)
        alone = self.words(rdzv_backend="static", rdzv_endpoint="127.0.0.1:29500")
        self.assertTrue(alone.endswith("--master-addr 127.0.0.1 --master-port 29500"), alone)
        self.assertNotIn("rdzv", self.words(rdzv_endpoint="localhost:0"))
        further = self.words(duplicate_stdout_filters=["a,b", "c"], shutdown_timeout=0, virtual_local_rank=True)
        self.assertTrue(further.endswith("--shutdown-timeout 0 --duplicate-stdout-filters a,,b,c --virtual-local-rank"))

    def test_log_folders_of_pytorch(self):
        streams = enum.IntFlag("Std", {"NONE": 0, "OUT": 1})
        specs = type("DefaultLogsSpecs", (), {"_local_ranks_filter": {1, 0}, "_tee": streams.NONE})()
        specs._root_log_dir, specs._redirects = "/tmp/torchelastic_x", streams.NONE
        self.assertEqual({name: value for name, value in launch._logs(specs).items() if value}, {"local-ranks-filter": "0,1"})
        specs._redirects = {0: streams.OUT}
        self.assertEqual(launch._logs(specs)["log-dir"], "/tmp/torchelastic_x")
        self.assertEqual(launch._logs(specs)["redirects"], "0:1")

    def test_what_has_no_counterpart_is_refused_by_name(self):
        for fields in (
            {"rdzv_backend": "etcd"},
            {"metrics_cfg": {"a": "b"}},
            {"event_log_handler": "mine"},
            {"logs_specs": types.SimpleNamespace()},
        ):
            with self.subTest(fields), self.assertRaisesRegex(ValueError, f"`{next(iter(fields))}`"):
                self.words(**fields)
        with self.assertRaisesRegex(ValueError, "health_check_server"):
            ddp_run.elastic_launch(ddp_run.LaunchConfig(1, 1, 1), "true", health_check_server=object())

    def test_variables_that_it_replaces_do_not_reach_ddp_run(self):
        names = {"PET_NNODES": "4", "PET_MAX_RESTARTS": "9", "PET_HANG_TIMEOUT": "60"}
        with mock.patch.dict(os.environ, names):
            self.assertEqual([name for name in launch._environment() if name.startswith("PET_")], ["PET_HANG_TIMEOUT"])

    def test_a_script_keeps_its_name(self):
        env = {}
        self.assertEqual(launch._target("py", ["-u", "train.py", "--lr"], env), ["--", "train.py", "--lr"])
        self.assertEqual(launch._target("py", ["-u", "-m", "pkg", "x"], env), ["-m", "--", "pkg", "x"])
        self.assertEqual(env, {"PYTHON_EXEC": "py"})
        self.assertEqual(launch._target("py", ["-u", "train"], {}), ["--no-python", "--", "py", "-u", "train"])

    def test_macros_are_torchruns(self):
        for text, expected in {"${local_rank}-$local_rank": "3-3", "$local_ranks $$x ${rank}": "$local_ranks $x ${rank}"}.items():
            self.assertEqual(functions._substituted(text, "3"), expected)

    def test_the_older_timeout_is_taken(self):
        self.assertEqual(ddp_run.LaunchConfig(1, 1, 1, rdzv_timeout=7).rdzv_configs, {"timeout": 7})


class Record(unittest.TestCase):
    def recorded(self, function):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "error.json")
            with mock.patch.dict(os.environ, {"TORCHELASTIC_ERROR_FILE": file}):
                try:
                    result = ddp_run.record(function)()
                except BaseException as error:
                    result = error
            if not os.path.exists(file):
                return result, None
            with open(file) as text:
                return result, json.load(text)["message"]

    def test_an_exception_is_written_and_raised(self):
        def train():
            raise KeyError("step")

        error, written = self.recorded(train)
        self.assertIsInstance(error, KeyError)
        self.assertEqual(written["message"], "KeyError: 'step'")
        self.assertIn("in train", written["extraInfo"]["py_callstack"])
        self.assertTrue(written["extraInfo"]["timestamp"].isdigit())

    def test_other_ends_are_not(self):
        self.assertEqual(self.recorded(lambda: 3), (3, None))
        self.assertEqual(self.recorded(lambda: sys.exit(0)), (None, None))
        for function in (lambda: sys.exit(2), lambda: ddp_run.check_generation()):
            with mock.patch.object(ddp_run._launcher, "cause", "rank 1 died"):
                error, written = self.recorded(function)
            self.assertIsInstance(error, (SystemExit, ddp_run.GenerationOver))
            self.assertIsNone(written)


class Importing(unittest.TestCase):
    def test_it_changes_nothing(self):
        env = {**os.environ, "PYTHONPATH": PACKAGE_PATH}
        subprocess.run([sys.executable, "-c", UNCHANGED], env=env, check=True, timeout=PATIENCE_S)


if __name__ == "__main__":
    unittest.main()
