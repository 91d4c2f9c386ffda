#!/usr/bin/env python3
"""Trains on two nodes whose jumbo frames a switch drops without an answer, and checks that the error says so.

    tests/cuts/mtu.py --programs target/debug     about a minute

The network is that of `run.py`, with an MTU of 9000 everywhere, and a rule on the router that drops what has more than
1,500 bytes. Also checks that with `net.ipv4.tcp_mtu_probing=1` the job trains, and where nothing is dropped.

Needs root and the programs of `run.py`. Exit code 77: something is missing, nothing was tested.
"""
import argparse
import fcntl
import os
import pathlib
import sys
import tempfile

import run as cuts

WORDS = "do not reach"
HINT = "ping -M do -s 8972"
SEGMENTS = "gso_max_segs"  # a switch sees frames, not what the hosts hand to their devices in one piece


def network(drops, probes):
    net = cuts.Network("mtu")
    for host in cuts.HOSTS:
        for place, link in (("router", host), (host, "eth0")):
            cuts.sh("ip", "-n", net.namespace(place), "link", "set", "dev", link, "mtu", "9000", SEGMENTS, "1")
            cuts.sh("tc", "-n", net.namespace(place), "qdisc", "del", "dev", link, "root")
    for source, target in (("a", "b"), ("b", "a")) if drops else ():
        net.inside("router", "iptables", "-I", "FORWARD", "-s", cuts.HOSTS[source], "-d", cuts.HOSTS[target],
                   "-m", "length", "--length", "1501:65535", "-j", "DROP")
    for host in ("a", "b") if probes else ():
        net.inside(host, "sh", "-c", "echo 1 >/proc/sys/net/ipv4/tcp_mtu_probing")
    return net


def outcome(directory, programs, drops, probes):
    """What came first: the error, with its hint, or steps."""
    directory.mkdir()
    net = network(drops, probes)
    job = cuts.Job(net, cuts.Case("nothing", "–", 3), directory, programs)

    def said():
        texts = [log.read_text() for log in directory.glob("*.log")]
        return any(WORDS in text and HINT in text for text in texts)

    try:
        job.wait(lambda: job.steps() >= cuts.BEGIN_AT or job.ended() or said(), 120)
        return "error" if said() else "trains" if job.steps() >= cuts.BEGIN_AT else "neither"
    finally:
        cuts.remove_namespaces(net.prefix)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=pathlib.Path, default=cuts.ROOT / "target/debug", metavar="DIR")
    programs = parser.parse_args().programs.resolve()
    if reason := cuts.missing():
        print(f"SKIPPED, NOTHING WAS TESTED: {reason}", file=sys.stderr)
        return 77
    lock = open("/run/lock/ddp-cuts", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    directory = pathlib.Path(tempfile.mkdtemp(prefix=cuts.PREFIX))
    cleaner, end = cuts.clean_up_at_the_end(directory)
    failed = False
    for name, drops, probes, wanted in (("dropped", True, False, "error"), ("probed", True, True, "trains"),
                                        ("passed", False, False, "trains")):
        found = outcome(directory / name, programs, drops, probes)
        failed |= found != wanted
        print(f"{'PASS' if found == wanted else 'FAIL'} large frames {name}: {found}", flush=True)
    os.close(end)
    os.waitpid(cleaner, 0)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
