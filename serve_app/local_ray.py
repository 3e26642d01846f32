"""The process that holds a local cluster's Ray: `python -m serve_app.local_ray`, started by `serve_app.local_cluster`.

A process of its own, because Ray reads its environment when it is imported, and so that it outlives its owner just long
enough to clean up: it stops when its standard input ends, which a killed owner can't prevent.
"""

import argparse
import os
import shutil
import signal
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"
READY = "ready"
PROXY_DIR = "p"


def main() -> None:
    """Start Ray, say so, wait for the end of standard input, stop everything and remove the run's directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--dashboard-port", type=int, required=True)
    parser.add_argument("--num-cpus", type=int, required=True)
    parser.add_argument("--num-gpus", type=int, default=0)
    args = parser.parse_args()
    try:
        with redirect_stdout(sys.stderr):  # the owner reads one word here, whatever Ray has to say
            _start(args)
        print(READY, flush=True)
        sys.stdin.read()
    finally:
        stop(args.run_dir)


def _start(args: argparse.Namespace) -> None:
    import ray

    ray.init(
        num_cpus=args.num_cpus,
        num_gpus=args.num_gpus,
        include_dashboard=True,
        dashboard_host=LOOPBACK,
        dashboard_port=args.dashboard_port,
        _node_ip_address=LOOPBACK,
        _temp_dir=str(args.run_dir / "ray"),
        log_to_driver=False,
        logging_level="ERROR",
    )


def stop(run_dir: Path) -> None:
    """Stop what `_start` and later deployments started, by its own ids, and remove the directory."""
    import ray
    from ray import serve

    with suppress(Exception):
        serve.shutdown()
    with suppress(Exception):
        ray.shutdown()
    remove_run(run_dir)


def remove_run(run_dir: Path) -> None:
    """Stop the run's HAProxy, which outlives its parent, and remove the directory.

    HAProxy is known by the run's configuration file on its command line.
    """
    mine = str(run_dir / PROXY_DIR).encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mine in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGTERM)
    shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
