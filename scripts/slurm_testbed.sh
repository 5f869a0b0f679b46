#!/usr/bin/env bash
# A real Slurm of two nodes on this one machine, in a folder of its own, with ports and a munge of
# its own.
#     eval "$(scripts/slurm_testbed.sh up)"     start it, or take the one that is up; sbatch, squeue
#                                               and hpczero then use it in this shell (SLURM_CONF)
#     scripts/slurm_testbed.sh status           what there is
#     scripts/slurm_testbed.sh down             end its jobs and daemons, and remove all of it
#     --name NAME (hz), for several at once     --cpus N (4) and --memory MB (2000) of each node;
#                                               nothing holds the jobs to them
# Two partitions of the same nodes: `main`, and `urgent`, whose jobs push those of `main` aside with
# SIGTERM and 10 s of grace. Needs the packages slurm-wlm and munge (Debian, Ubuntu). Whoever starts
# it is the one who can run jobs; root is not needed.
# Exit code 3: this machine cannot do it, and why.
set -euo pipefail

self=$(realpath "${BASH_SOURCE[0]}")
name=hz cpus=4 memory=2000
PATH=$PATH:/usr/sbin:/sbin

fail() {
    local code=$1
    shift
    echo "$(basename "$self"): $*" >&2
    exit "$code"
}

usage() {
    sed -n '2,/^set -/s/^# \{0,1\}//p' "$self"
}

folder() { echo "${HPCZERO_TESTBEDS:-/tmp}/hpczero-slurm-$(id -u)-$name"; }
conf() { echo "$(folder)/slurm.conf"; }

check_machine() {
    local program missing=""
    for program in slurmctld slurmd munged mungekey sbatch; do
        command -v "$program" >/dev/null || missing+=" $program"
    done
    [ -z "$missing" ] ||
        fail 3 "not found:$missing. Debian and Ubuntu: apt-get update && apt-get install" \
            "--no-install-recommends slurm-wlm munge"
}

# Ports that nobody listens on: of the controller and of two nodes.
free_ports() {
    python3 -c '
import socket
sockets = [socket.socket() for _ in range(3)]
for one in sockets:
    one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in sockets))'
}

write_conf() { # PORT PORT PORT
    cat >"$(conf)" <<END
ClusterName=$name
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$1
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$(folder)/munge.socket
StateSaveLocation=$(folder)/state
SlurmctldPidFile=$(folder)/slurmctld.pid
SlurmctldLogFile=$(folder)/slurmctld.log
SlurmdSpoolDir=$(folder)/%n.spool
SlurmdPidFile=$(folder)/%n.pid
SlurmdLogFile=$(folder)/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0,bf_interval=5
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
ReturnToService=2
KillWait=10
MinJobAge=60
NodeName=n1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$2 CPUs=$cpus RealMemory=$memory
NodeName=n2 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$3 CPUs=$cpus RealMemory=$memory
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=1-0 PriorityTier=1 \
    PreemptMode=CANCEL GraceTime=10
PartitionName=urgent Nodes=n[1-2] MaxTime=1-0 PriorityTier=9 PreemptMode=OFF
END
}

# From the first thing made on, whatever ends this removes all of it again, unless it came up whole.
up() {
    local ports
    check_machine
    if ! mkdir -m 755 "$(folder)" 2>/dev/null; then
        take_up
        return
    fi
    trap down EXIT
    trap 'exit 130' INT TERM HUP
    mkdir "$(folder)/state" "$(folder)"/n{1,2}.spool
    ports=$(free_ports)
    # shellcheck disable=SC2086  # three words
    write_conf $ports
    export SLURM_CONF
    SLURM_CONF=$(conf)
    start_daemons >"$(folder)/start.log" 2>&1 ||
        fail 3 "a daemon did not start: $(tail -n 3 "$(folder)/start.log")"
    await_nodes || fail 3 "the nodes did not come up: $(tail -qn 3 "$(folder)"/*.log)"
    trap - EXIT
    echo "export SLURM_CONF=$(conf)"
}

# The one of this name that is there: it has to answer, and to be what is asked for.
take_up() {
    local way_out="'$self down --name $name' removes it, --name makes another"
    [ -O "$(folder)" ] && [ ! -L "$(folder)" ] ||
        fail 1 "$(folder) is not yours: --name makes another"
    [ ! -s "$(conf)" ] || grep -q " CPUs=$cpus RealMemory=$memory\$" "$(conf)" ||
        fail 1 "the testbed in $(folder) has other nodes: $way_out"
    SLURM_CONF=$(conf) timeout 20 sinfo --noheader >/dev/null 2>&1 ||
        fail 1 "there is a testbed in $(folder), and it does not answer: $way_out"
    echo "export SLURM_CONF=$(conf)"
}

start_daemons() {
    local node
    mungekey --create --keyfile="$(folder)/munge.key" &&
        munged --force --key-file="$(folder)/munge.key" --socket="$(folder)/munge.socket" \
            --pid-file="$(folder)/munged.pid" --log-file="$(folder)/munged.log" \
            --seed-file="$(folder)/munge.seed" || return
    slurmctld -f "$(conf)" || return
    for node in n1 n2; do slurmd -N "$node" -f "$(conf)" || return; done
}

await_nodes() {
    local _
    for _ in {1..120}; do
        [ "$(sinfo --noheader --partition=main --states=idle --format=%D 2>/dev/null)" != 2 ] ||
            return 0
        sleep 0.5
    done
    return 1
}

# Daemons and jobs, wherever they have gone: all of them have the configuration's name in their
# environment.
processes() {
    grep -lszxF "SLURM_CONF=$(conf)" /proc/[0-9]*/environ 2>/dev/null |
        cut -d/ -f3 | grep -vx "$$" || true
}

await_end() { # TENTHS: of a second
    local _
    for _ in $(seq "$1"); do
        [ -n "$(processes)" ] || return 0
        sleep 0.1
    done
    return 1
}

down() {
    local pid
    [ -d "$(folder)" ] || return 0
    unset SLURM_CONF # this script's own
    if [ -f "$(folder)/slurmctld.pid" ]; then
        SLURM_CONF=$(conf) timeout 20 scancel --quiet --user="$(id -un)" 2>/dev/null || true
        for _ in {1..30}; do
            [ -n "$(SLURM_CONF=$(conf) timeout 5 squeue --noheader 2>/dev/null || true)" ] || break
            sleep 0.5
        done
    fi
    for pid in $(processes); do kill -TERM "$pid" 2>/dev/null || true; done
    await_end 100 || for pid in $(processes); do kill -KILL "$pid" 2>/dev/null || true; done
    await_end 50 || true
    rm -rf "$(folder)"
}

status() {
    [ -d "$(folder)" ] || fail 1 "there is no testbed $name"
    echo "testbed $name in $(folder): $(processes | wc -l) processes"
    SLURM_CONF=$(conf) sinfo --Node --format="  %N %P %T %c CPUs"
    SLURM_CONF=$(conf) squeue --format="  job %i %j %T %R"
}

verb=${1:-help}
shift || true
while [ $# -gt 0 ]; do
    case $1 in
    --name | --cpus | --memory)
        [ $# -ge 2 ] || fail 2 "$1 needs a value"
        case $1 in
        --name) name=$2 ;;
        --cpus) cpus=$2 ;;
        --memory) memory=$2 ;;
        esac
        shift 2
        ;;
    *) fail 2 "unknown: $1" ;;
    esac
done
[[ $name =~ ^[a-z][a-z0-9]{0,19}$ ]] ||
    fail 2 "--name $name: up to 20 small letters and digits, the first a letter"
[[ $cpus =~ ^[1-9][0-9]*$ ]] && [[ $memory =~ ^[1-9][0-9]*$ ]] ||
    fail 2 "--cpus $cpus --memory $memory: whole numbers"
case $verb in
up | down | status) "$verb" ;;
help | -h | --help) usage ;;
*) fail 2 "unknown: $verb; there are up, status and down" ;;
esac
