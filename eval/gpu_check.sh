#!/usr/bin/env bash
# The GPU check, from a checkout, with nothing installed but torch, triton and transformers, and no network. See gpu_check.py for arguments.
set -uo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
export PYTHONPATH="$root/src:$root/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
case " $* " in *" --dry-run "*) limit=3600 ;; *) limit=480 ;; esac
exec timeout --kill-after=5 "$limit" "${PYTHON:-python3}" "$root/eval/gpu_check.py" "$@"
