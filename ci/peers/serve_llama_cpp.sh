#!/bin/sh
# Serve a Hugging Face checkpoint with llama.cpp (llama-cpp-python's server), for a cmd: target:
#   cmd:ci/peers/serve_llama_cpp.sh VENV {model} {port} {precision} {max_context}
# The conversion lies in a temporary directory of its own and goes when the server ends.
set -eu
if [ $# -ne 5 ]; then
    echo "usage: serve_llama_cpp.sh VENV MODEL PORT fp32|bf16 MAX_CONTEXT" >&2
    exit 2
fi
python="$1/bin/python" model="$2" port="$3" precision="$4" context="$5"
case "$precision" in
fp32) type=f32 cache=0 ;; # ggml type numbers: 0 is F32, 30 is BF16
bf16) type=bf16 cache=30 ;;
*)
    echo "precision $precision: llama.cpp is served in fp32 or bf16 here" >&2
    exit 2
    ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 143' INT TERM
"$python" "$(dirname "$0")/to_gguf.py" "$model" "$work/model.gguf" --type "$type"
"$python" -m llama_cpp.server --model "$work/model.gguf" --model_alias "$(basename "$model")" \
    --host 127.0.0.1 --port "$port" --n_ctx "$context" --n_threads 2 --logits_all true \
    --type_k "$cache" --type_v "$cache" --flash_attn false --seed 0 --verbose false --interrupt_requests false &
server=$!
wait "$server"
