#!/usr/bin/env bash
# Several "hosts" on one machine: network namespaces on a bridge, joined by links of a chosen speed,
# with mpirun across them.
#     scripts/netns_testbed.sh run [--hosts N] [--rate R] [--ranks-per-host K] COMMAND...
#         make the hosts, run COMMAND on all of them under MPI, remove everything (after Ctrl-C and
#         failures too)
#     scripts/netns_testbed.sh up [--hosts N] [--rate R]
#         make them and leave them there: `run` then uses them
#     scripts/netns_testbed.sh status    what there is
#     scripts/netns_testbed.sh down      end what runs in them and remove them
#     --hosts N (2)              --rate R (1gbit; as tc writes it: 100mbit, 10gbit, ...)
#     --ranks-per-host K (2)     --name NAME (hz), for several at once
# For example:
#     scripts/netns_testbed.sh run --rate 1gbit hpczero run jobspecs/quickstart.toml --fresh
#
# A host has its own name, network, and /dev/shm; files and cores are shared. Nothing of this
# machine's own network is touched: the bridge lies in a namespace too, and there is no way out.
# Needs root, iproute2, and MPICH's mpirun in PATH (Hydra: MPICH from PyPI, or Intel MPI).
# Exit code 3: this machine cannot do it, and why.
set -euo pipefail

self=$(realpath "${BASH_SOURCE[0]}")
name=hz hosts=2 rate=1gbit per_host=2
subnet=10.77.0 # inside the namespaces only

fail() {
    local code=$1
    shift
    echo "$(basename "$self"): $*" >&2
    exit "$code"
}

usage() {
    sed -n '2,/^set -/s/^# \{0,1\}//p' "$self"
}

state() { echo "/run/hpczero-netns/$name"; }
namespace() { echo "$name-$1"; }
exists() { [ -d "$(state)" ]; }

# The namespaces of this testbed: the hosts, and the one that holds the bridge.
namespaces() {
    local number
    for number in net $(cut -d' ' -f1 "$(state)/numbers" 2>/dev/null); do
        [ ! -e "/run/netns/$(namespace "$number")" ] || namespace "$number"
    done
}

check_machine() {
    local tool missing=""
    for tool in ip tc unshare mount; do
        command -v "$tool" >/dev/null || missing+=" $tool"
    done
    [ -z "$missing" ] ||
        fail 3 "not found:$missing. Debian and Ubuntu: apt-get update && apt-get install" \
            "iproute2 util-linux mount"
    [ "$(id -u)" -eq 0 ] ||
        fail 3 "network namespaces need root: run it with sudo, or in a container with --privileged"
}

# kilobits a second of a rate as tc writes it; only to choose how much may be sent at once
kilobits() {
    [[ $rate =~ ^([1-9][0-9]*)([kmg])bit$ ]] ||
        fail 2 "--rate $rate: a whole number and kbit, mbit or gbit, as in 1gbit"
    case ${BASH_REMATCH[2]} in
    k) echo "${BASH_REMATCH[1]}" ;;
    m) echo "${BASH_REMATCH[1]}000" ;;
    g) echo "${BASH_REMATCH[1]}000000" ;;
    esac
}

shape() { # NAMESPACE DEVICE KILOBITS
    # bytes that pass at once after a pause, which no real link has: 0.5 ms of it, but a segment
    local burst=$(($3 / 16))
    [ "$burst" -ge 65536 ] || burst=65536
    tc -n "$1" qdisc add dev "$2" root tbf rate "$rate" burst "$burst" latency 50ms
}

# BBR, where a machine has made it the default, stands still for 200 ms now and then to measure the
# empty link; clusters have CUBIC or Reno.
usual_congestion_control() { # NAMESPACE
    ip netns exec "$1" bash -c 'cd /proc/sys/net/ipv4 && {
        echo cubic >tcp_congestion_control || echo reno >tcp_congestion_control
    } 2>/dev/null'
}

make_host() { # NUMBER KILOBITS
    local host port="port$1" net
    host=$(namespace "$1") net=$(namespace net)
    ip netns add "$host" &&
        ip -n "$host" link set lo up &&
        ip -n "$net" link add "$port" type veth peer name eth0 netns "$host" &&
        ip -n "$net" link set "$port" master bridge up &&
        ip -n "$host" address add "$subnet.$1/24" dev eth0 &&
        ip -n "$host" link set eth0 up &&
        usual_congestion_control "$host" &&
        shape "$host" eth0 "$2" &&
        shape "$net" "$port" "$2"
}

# From the first thing made on, whatever ends this script removes all of it again; `up` alone leaves
# it there, once it is whole.
up() {
    local number speed others
    check_machine
    [[ $hosts =~ ^[0-9]+$ ]] && [ "$hosts" -ge 1 ] && [ "$hosts" -le 200 ] ||
        fail 2 "--hosts $hosts: from 1 to 200"
    speed=$(kilobits)
    others=$(compgen -G "/run/netns/$name-*" || true)
    exists || [ -z "$others" ] ||
        fail 1 "there are network namespaces of somebody else: ${others//$'\n'/ };" \
            "--name chooses other names"
    mkdir -p "$(dirname "$(state)")"
    mkdir "$(state)" 2>/dev/null ||
        fail 1 "there is a testbed $name already: '$self down --name $name' removes it," \
            "--name makes another"
    trap down EXIT
    trap 'exit 130' INT TERM HUP
    seq "$hosts" >"$(state)/numbers"
    echo "$rate" >"$(state)/rate"
    printf '127.0.0.1 localhost\n' >"$(state)/hosts"
    for number in $(seq "$hosts"); do
        echo "$subnet.$number $(namespace "$number")" >>"$(state)/hosts"
    done
    printf '#!/usr/bin/env bash\nexec %q enter --name %q "$@"\n' "$self" "$name" >"$(state)/launch"
    chmod 755 "$(state)/launch"
    make_all "$speed" ||
        fail 3 "this machine cannot make namespaces with shaped links (the message is above;" \
            "the kernel needs veth, bridge, sch_tbf)"
}

make_all() { # KILOBITS
    local net number
    net=$(namespace net)
    ip netns add "$net" &&
        ip -n "$net" link add bridge type bridge &&
        ip -n "$net" link set bridge up || return
    for number in $(seq "$hosts"); do make_host "$number" "$1" || return; done
}

processes() {
    local one
    for one in $(namespaces); do ip netns pids "$one"; done
}

down() {
    local one _
    exists || return 0
    processes | xargs -r kill -TERM 2>/dev/null || true
    for _ in {1..20}; do
        [ -n "$(processes)" ] || break
        sleep 0.1
    done
    processes | xargs -r kill -KILL 2>/dev/null || true
    for one in $(namespaces); do ip netns delete "$one"; done # with its devices
    rm -rf "$(state)"
    rmdir /run/hpczero-netns 2>/dev/null || true
}

status() {
    local number
    exists || fail 1 "there is no testbed $name"
    echo "testbed $name: $(wc -l <"$(state)/numbers") hosts, links of $(cat "$(state)/rate")"
    while read -r number; do
        echo "  $(namespace "$number") $subnet.$number:" \
            "$(ip netns pids "$(namespace "$number")" | wc -l) processes"
    done <"$(state)/numbers"
}

# A process on a host, as ssh would start it: options, the host's name or address, then words for
# its shell. (Called by mpirun.)
enter() {
    local host
    while [[ $1 == -* ]]; do shift; done
    host=$1
    shift
    exec ip netns exec "$host" unshare --uts bash -c "hostname $host &&
        mount -t tmpfs tmpfs /dev/shm && mount --bind $(state)/hosts /etc/hosts && $*"
}

# After a signal: MPI may end its processes in order for 10 s, or until the next signal.
stop() {
    trap 'exit 130' INT TERM HUP
    kill -INT -- "-$job" 2>/dev/null || true
    for _ in {1..100}; do
        kill -0 -- "-$job" 2>/dev/null || break
        sleep 0.1
    done
    kill -KILL -- "-$job" 2>/dev/null || true
    exit 130
}

run() {
    local names launcher
    [ $# -gt 0 ] || fail 2 "run needs a command"
    [[ $per_host =~ ^[1-9][0-9]*$ ]] || fail 2 "--ranks-per-host $per_host: a whole number"
    check_machine
    launcher=$(command -v mpirun) ||
        fail 3 "there is no mpirun in PATH: activate the environment that has MPICH"
    [[ $("$launcher" --version 2>&1) =~ HYDRA|Hydra|Intel ]] ||
        fail 3 "$launcher is not MPICH's (Hydra): activate the environment that has MPICH"
    exists || up
    hosts=$(wc -l <"$(state)/numbers")
    names=$(sed "s/^/$name-/" "$(state)/numbers" | paste -sd,)
    local words=("$launcher" -launcher ssh -launcher-exec "$(state)/launch" -hosts "$names"
        -iface eth0 -n $((hosts * per_host)) -ppn "$per_host" "$@")
    # Hydra hands its end of stdin to ranks that may have ended: of SIGPIPE it would die
    trap '' PIPE
    # UCX would find the other hosts' memory and go around the links
    set -m # in the background, so that a signal to this script counts at once
    UCX_TLS=tcp,self "$(state)/launch" "$(namespace 1)" "exec$(printf ' %q' "${words[@]}")" \
        </dev/null &
    job=$!
    set +m
    trap stop INT TERM HUP
    wait "$job"
}

verb=${1:-help}
shift || true
while [ $# -gt 0 ] && [ "$verb" != help ]; do
    case $1 in
    --hosts | --rate | --ranks-per-host | --name)
        [ $# -ge 2 ] || fail 2 "$1 needs a value"
        case $1 in
        --hosts) hosts=$2 ;;
        --rate) rate=$2 ;;
        --ranks-per-host) per_host=$2 ;;
        --name) name=$2 ;;
        esac
        shift 2
        ;;
    *) break ;;
    esac
done
[[ $name =~ ^[a-z][a-z0-9]{0,19}$ ]] ||
    fail 2 "--name $name: up to 20 small letters and digits, the first a letter"
case $verb in
up | down | status)
    [ $# -eq 0 ] || fail 2 "$verb does not take $1"
    "$verb"
    trap - EXIT
    ;;
run | enter) "$verb" "$@" ;;
help | -h | --help) usage ;;
*) fail 2 "unknown: $verb; there are run, up, status and down" ;;
esac
