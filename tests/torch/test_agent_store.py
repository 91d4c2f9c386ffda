"""The store that the launcher hosts at MASTER_PORT, as torchrun's agent does. Started by `tests/torch/run.sh`."""
import os
import unittest

from launched import Launched, ROOT, reserved_port

SCRIPTS = ROOT / "tests/torch/scripts"


class AgentStore(unittest.TestCase):
    def launch(self, *words, env=None):
        launched = Launched(*words, env=env)
        self.addCleanup(launched.kill)
        return launched

    def expect(self, launched, code=0):
        self.assertEqual(launched.finish(), code, launched.transcript())
        return launched

    def expect_lines(self, launched, pattern, count):
        found = launched.matches(pattern)
        self.assertEqual(len(found), count, f"lines with `{pattern}` in\n{launched.transcript()}")
        return found

    def run_operations(self, **env):
        launched = self.expect(self.launch("--nproc-per-node", 3, SCRIPTS / "store_api.py", env=env))
        self.expect_lines(launched, "answers as PyTorch's own", 1)
        self.expect_lines(launched, "saw all values taken", 3)

    def test_all_ranks_are_clients(self):
        self.run_operations(MODE="client")

    def test_a_rank_that_would_open_a_store_uses_this_one(self):
        self.run_operations(MODE="master")

    def test_rank_0_opens_the_store_where_torchrun_is_told_to_let_it(self):
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        launched = self.expect(self.launch("--nproc-per-node", 3, SCRIPTS / "master_port.py", env=env))
        self.expect_lines(launched, "met 3 at the launcher's port$", 3)
        self.expect_lines(launched, "has failed to bind", 0)

    def test_the_store_outlives_rank_0(self):
        launched = self.expect(self.launch("--nproc-per-node", 3, SCRIPTS / "store_outlives.py"))
        self.expect_lines(launched, "went on without rank 0$", 2)

    def test_an_interpreter_in_front(self):
        words = ["--nproc-per-node", 3, "--no-python", os.environ["PYTHON"], "-u", SCRIPTS / "store_outlives.py"]
        self.expect_lines(self.expect(self.launch(*words)), "went on without rank 0$", 2)

    def test_the_store_outlives_all_workers_of_its_node(self):
        holder, port = reserved_port()
        self.addCleanup(holder.close)
        common = ["--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "outlives"]
        nodes = [
            self.launch(*common, "--node-rank", rank, "--nproc-per-node", workers, SCRIPTS / "store_outlives.py")
            for rank, workers in ((0, 1), (1, 2))
        ]
        for node in nodes:
            self.expect(node)
        self.expect_lines(nodes[1], "went on without rank 0$", 2)

    def expect_restart(self, *words):
        launched = self.expect(self.launch("--max-restarts", 1, *words))
        self.expect_lines(launched, r"^\[\d\] attempt 0 port .* found nothing$", 2)
        return self.expect_lines(launched, "attempt 1 port (.*) found nothing$", 2)

    def test_a_restart_begins_with_an_empty_store(self):
        self.expect_restart("--nproc-per-node", 2, SCRIPTS / "store_restarts.py")

    def test_a_restart_has_the_port_that_was_asked_for(self):
        holder, port = reserved_port()
        holder.close()
        words = ["--nproc-per-node", 2, "--master-port", port, SCRIPTS / "store_restarts.py"]
        self.assertEqual({match[1] for match in self.expect_restart(*words)}, {str(port)})

    def test_a_restart_of_two_nodes_has_the_port_that_was_asked_for(self):
        holder, port = reserved_port()
        holder.close()
        meeting, endpoint = reserved_port()
        self.addCleanup(meeting.close)
        common = ["--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{endpoint}", "--rdzv-id", "again"]
        common += ["--max-restarts", 1, "--master-port", port]
        nodes = [self.launch(*common, "--node-rank", rank, SCRIPTS / "store_restarts.py") for rank in range(2)]
        for node in nodes:
            self.expect(node)
            self.expect_lines(node, f"attempt 1 port {port} found nothing$", 1)

    def test_gloo_with_either_setting_of_libuv(self):
        for use_libuv in "01":
            with self.subTest(use_libuv=use_libuv):
                env = {"USE_LIBUV": use_libuv}
                launched = self.expect(self.launch("--nproc-per-node", 2, SCRIPTS / "all_reduce.py", env=env))
                self.expect_lines(launched, "sum 3 world 2", 2)

    def test_what_is_no_client_is_closed_and_named_once(self):
        launched = self.expect(self.launch("--nproc-per-node", 2, SCRIPTS / "store_refuses.py"))
        self.expect_lines(launched, "the store serves on$", 2)
        self.expect_lines(launched, r"closed a connection from `.*` to the store at MASTER_PORT", 1)


if __name__ == "__main__":
    unittest.main()
