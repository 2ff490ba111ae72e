#!/bin/sh
# Check and benchmark the engine of this folder on a machine with an NVIDIA GPU:
#
#   sh run_on_gpu.sh [FOLDER FOR RESULTS]
#
# It needs python3 without packages, and trtexec (TensorRT 10.12 or later); for TensorRT-RTX, tensorrt_rtx or trtexec.
# Set TRTEXEC=/path/to/trtexec to use another program. The script does not change this folder. Exit codes: 0 all outputs
# are as expected, 1 an output is wrong, 2 something is missing or failed.
set -u

say() { printf '%s\n' "$*"; }
stop() {
    printf 'run_on_gpu.sh: %s\n' "$*" >&2
    exit 2
}

results=${1:-$(mktemp -d)} || stop "cannot create a folder for results; pass one: sh run_on_gpu.sh FOLDER"
mkdir -p "$results" && results=$(cd "$results" && pwd) || stop "$results cannot be written"
cd "$(dirname "$0")" || stop "cannot enter the folder of this script"
. ./gpu/settings.sh || stop "gpu/settings.sh is missing: copy the whole folder"

# -- the tool ----------------------------------------------------------------------------------------------------------

find_tool() {
    command -v "$1" && return
    for place in /usr/src/tensorrt/bin /opt/tensorrt/bin; do
        [ -x "$place/$1" ] && printf '%s\n' "$place/$1" && return
    done
    return 1
}

reason=
if [ -n "${TRTEXEC:-}" ]; then
    tool=$(command -v "$TRTEXEC") || stop "TRTEXEC is $TRTEXEC, which is not a program"
elif ! tool=$(find_tool "$OWN_TOOL"); then
    tool=$(find_tool trtexec) || stop "trtexec is missing: it is part of TensorRT, and in PATH in NVIDIA's container nvcr.io/nvidia/tensorrt; add it to PATH, or run TRTEXEC=/path/to/trtexec sh run_on_gpu.sh"
fi
[ "${tool##*/}" = tensorrt_rtx ] && is_rtx=yes || is_rtx=no
[ "$OWN_TOOL" = tensorrt_rtx ] && wants_rtx=yes || wants_rtx=no
[ "$is_rtx" = "$wants_rtx" ] || reason="$ENGINE belongs to another library than ${tool##*/}"
command -v python3 > /dev/null || say "python3 is missing: the engine is benchmarked, but its outputs are not compared"

# -- the engine --------------------------------------------------------------------------------------------------------

plan=$results/model.plan
built=no

build() {
    say "$1: building it from $ONNX, which takes minutes"
    rm -f "$plan"
    # From release 11 on, networks are always strongly typed, and the option may disappear.
    "$tool" --help 2>&1 | grep -q -e --stronglyTyped && typed=--stronglyTyped || typed=
    "$tool" --onnx="$ONNX" --saveEngine="$plan" ${typed:+"$typed"} --skipInference \
        ${MIN_SHAPES:+"--minShapes=$MIN_SHAPES"} ${OPT_SHAPES:+"--optShapes=$OPT_SHAPES"} \
        ${MAX_SHAPES:+"--maxShapes=$MAX_SHAPES"} > "$results/build.log" 2>&1 && [ -s "$plan" ] \
        || stop "${tool##*/} could not build the engine; the end of $results/build.log: $(tail -n 5 "$results/build.log")"
    built=yes
}

if [ -z "$reason" ] && [ ! -s "$ENGINE" ]; then
    reason="$ENGINE is missing"
fi
if [ -z "$reason" ] && [ -n "$CAPABILITY" ]; then
    here=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1 | tr -d '. ')
    [ -z "$here" ] || [ "sm$here" = "$CAPABILITY" ] || reason="$ENGINE is for $CAPABILITY, but this GPU is sm$here"
fi
if [ -n "$reason" ]; then
    build "$reason"
else
    # The file ends with a line with its checksum, which the library would reject.
    head -c "$ENGINE_BYTES" "$ENGINE" > "$plan" || stop "$plan cannot be written"
fi

# -- the runs ----------------------------------------------------------------------------------------------------------

run() {
    shapes=$(cat "gpu/$1/shapes") && inputs=$(cat "gpu/$1/inputs") || stop "gpu/$1 is incomplete: copy the whole folder"
    rm -f "$results/$1.json"
    "$tool" --loadEngine="$plan" ${shapes:+"--shapes=$shapes"} --loadInputs="$inputs" \
        --exportOutput="$results/$1.json" > "$results/$1.log" 2>&1 && [ -s "$results/$1.json" ]
}

wrong=no
for case in $CASES; do
    if ! run "$case" && [ "$built" = no ]; then
        build "$ENGINE does not run on this machine ($(grep -e '\[E\]' "$results/$case.log" | tail -n 1))"
        run "$case"
    fi
    [ -s "$results/$case.json" ] \
        || stop "${tool##*/} failed; the end of $results/$case.log: $(tail -n 5 "$results/$case.log")"
    say "$case"
    sed -n -E 's/^.*\[I\] ((Throughput|Latency|GPU Compute Time): .*)$/  \1/p' "$results/$case.log"
    if command -v python3 > /dev/null; then
        python3 gpu/compare.py "gpu/$case" "$results/$case.json"
        case $? in
            0) ;;
            1) wrong=yes ;;
            *) stop "the outputs of $case cannot be compared" ;;
        esac
    fi
done

# -- for a server ------------------------------------------------------------------------------------------------------

if [ "$built" = yes ] && [ "$is_rtx" = no ]; then
    repository=$results/triton/$NAME
    mkdir -p "$repository/1" && cp gpu/config.pbtxt "$repository/" && mv "$plan" "$repository/1/model.plan" \
        || stop "$repository cannot be written"
    say "model repository for Triton with the engine of this GPU: $results/triton"
fi
say "logs and outputs: $results"
[ "$wrong" = no ] || exit 1
command -v python3 > /dev/null || exit 2
