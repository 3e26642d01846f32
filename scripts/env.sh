# Source this, do not run it: `source scripts/env.sh`, on every node, before `ray start` or `serve deploy` by hand.
# It puts the environment made by scripts/setup on the path and turns on the data path that fairway-serve needs: Ray reads
# these variables when its processes start, so an application cannot set them. (serve_app/environment.py explains.)
fairway_root=$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")/.." && pwd)
export PATH="$fairway_root/.venv/bin:$PATH"
unset fairway_root

export RAY_SERVE_ENABLE_HA_PROXY=1
export RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=1
export RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY=1
export RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0
export RAY_SERVE_INGRESS_ROUTER_REPLICAS_PER_NODE=2
export PYTHONHASHSEED=0
