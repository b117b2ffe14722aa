#!/usr/bin/env bash
# cluster.sh: a private SLURM cluster of N virtual nodes on this one machine, for tests.
#
#   cluster.sh install              apt-get install what is missing (the only step that needs a network)
#   cluster.sh start N [MODE]       bring up nodes n1..nN, wait until all are idle; a no-op if already so
#   cluster.sh stop                 cancel the jobs, end the daemons by pid, take the namespaces down
#   cluster.sh status               the daemons' pids and sinfo; exit 1 if not all is up
#   cluster.sh env                  a line to eval: export SLURM_CONF=...
#   cluster.sh node-exec nK CMD..   run CMD as on node nK (in its namespaces)
#   cluster.sh node-kill nK         the node dies: its slurmd and all that runs on it, at once
#   cluster.sh node-start nK        ... and comes back
#   cluster.sh node-net nK down|up  pull the node's network cable, and plug it in again (netns mode)
#
# MODE  netns  (default where it works) each node has its own hostname, its own /etc/hosts and its own network
#              stack: $SLURM_CI_NET.K on a bridge of ours. Real addresses, and no way out of the bridge.
#       uts    own hostname and /etc/hosts, where nK is 127.77.0.K, but one shared loopback network.
#       plain  no namespaces: every node has the machine's hostname; n1..nN go into /etc/hosts as 127.0.0.1
#              (marked lines, taken out again by stop). For containers that may not unshare.
#
# Partitions: main (the default), and low, whose jobs are preempted (SIGTERM, GraceTime, SIGKILL, requeue) by
# jobs in main or high.
#
# Everything lies in $SLURM_CI_DIR. Optional environment:
#   SLURM_CI_DIR=/tmp/slurm-ci  keep it short: unix socket paths end at 107 characters
#   SLURM_CI_CPUS=4             CPUs that a node claims (counted, never bound)
#   SLURM_CI_MEM=4000           MiB that a node claims (counted, never enforced)
#   SLURM_CI_GPUS=8             GPUs that a node claims (there are none), so that job scripts may ask for them
#   SLURM_CI_PORT=16817         first of N+2 TCP ports
#   SLURM_CI_NET=10.77.0        /24 of the bridge
#   SLURM_CI_KILLWAIT=5         seconds from SIGTERM to SIGKILL (Slurm's default: 30)
#   SLURM_CI_GRACE=20           GraceTime of partition low
#   SLURM_CI_REQUEUE_WAIT=15    cred_expire: seconds before a requeued job may start (default 120); or skip it with
#                               scontrol update JobId=$J StartTime=now
#   SLURM_CI_NODE_TIMEOUT=20    SlurmdTimeout: seconds until a dead node is seen as down (default 300)
#   SLURM_CI_EXTRA=             more slurm.conf lines
set -euo pipefail

D=${SLURM_CI_DIR:-/tmp/slurm-ci}
CPUS=${SLURM_CI_CPUS:-4} MEM=${SLURM_CI_MEM:-4000} GPUS=${SLURM_CI_GPUS:-8}
PORT=${SLURM_CI_PORT:-16817} NET=${SLURM_CI_NET:-10.77.0}
KILLWAIT=${SLURM_CI_KILLWAIT:-5} GRACE=${SLURM_CI_GRACE:-20} REQUEUE_WAIT=${SLURM_CI_REQUEUE_WAIT:-15}
NODE_TIMEOUT=${SLURM_CI_NODE_TIMEOUT:-20} EXTRA=${SLURM_CI_EXTRA:-}
TAG="# slurm-ci $D"                      # marks our lines in /etc/hosts (plain mode)
BR=scbr$((PORT % 10000))                 # names of our bridge, veths and namespaces (netns mode)
export SLURM_CONF=$D/slurm.conf
export PATH=$PATH:/usr/sbin:/sbin
N=0 MODE=

say() { echo "cluster.sh: $*" >&2; }
die() { say "$*"; exit 1; }

# --- processes: only ever by pid, and only while the pid is still what we started --------------------------------
alive() {                                # a zombie is dead: pid 1 of a container may never reap
  local st; st=$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null) && [ -n "$st" ] && [ "${st%% *}" != Z ]
}
ours() {                                 # ours PIDFILE: prints the pid if it runs and its command line names $D
  local p; [ -s "$1" ] || return 1
  p=$(tr -dc 0-9 <"$1"); [ -n "$p" ] && alive "$p" || return 1
  tr '\0' ' ' <"/proc/$p/cmdline" 2>/dev/null | grep -qF "$D/" || return 1
  echo "$p"
}
end_pid() {                              # TERM, up to 5 s, then KILL
  local i; kill -TERM "$1" 2>/dev/null || return 0
  for i in $(seq 50); do alive "$1" || return 0; sleep 0.1; done
  kill -KILL "$1" 2>/dev/null || true
}
end() { local p; if p=$(ours "$1"); then end_pid "$p"; fi; rm -f "$1"; }
strays() {                               # daemons of ours whose pid file is gone
  local d
  for d in /proc/[0-9]*; do
    case $(cat "$d/comm" 2>/dev/null) in munged|slurmctld|slurmd) ;; *) continue;; esac
    tr '\0' ' ' <"$d/cmdline" 2>/dev/null | grep -qF "$D/" && echo "${d#/proc/}"
  done; true
}
node_procs() {                           # node_procs nK: all that runs on the node, its slurmd included
  local d ns
  if [ -s "$D/run/ns.$1" ]; then         # in the mount namespace that we made for it
    ns=$(cat "$D/run/ns.$1")
    for d in /proc/[0-9]*; do [ "$(readlink "$d/ns/mnt" 2>/dev/null)" = "$ns" ] && echo "${d#/proc/}"; done
  else                                   # plain: what Slurm's own environment marks as of this cluster and node
    ours "$D/run/slurmd.$1.pid" || true
    for d in /proc/[0-9]*; do
      grep -qzxF "SLURM_CONF=$SLURM_CONF" "$d/environ" 2>/dev/null &&
        grep -qzxF "SLURMD_NODENAME=$1" "$d/environ" 2>/dev/null && echo "${d#/proc/}"
    done
  fi; true
}
node_end() {
  local p
  for p in $(node_procs "$1"); do kill -KILL "$p" 2>/dev/null || true; done
  rm -f "$D/run/slurmd.$1.pid"
}

# --- shape -------------------------------------------------------------------------------------------------------
node_addr() { case $MODE in plain) echo 127.0.0.1;; uts) echo "127.77.0.$1";; netns) echo "$NET.$1";; esac; }
node_port() { case $MODE in netns) echo $((PORT + 1));; *) echo $((PORT + 1 + $1));; esac; }
node_host() { case $MODE in plain) hostname;; *) echo "n$1";; esac; }
ctl_addr()  { case $MODE in netns) echo "$NET.254";; *) echo 127.0.0.1;; esac; }
signature() {
  echo "$CPUS $MEM $GPUS $PORT $NET $KILLWAIT $GRACE $REQUEUE_WAIT $NODE_TIMEOUT $EXTRA" | cksum | cut -d' ' -f1
}
load() { [ -s "$D/cluster" ] || return 1; . "$D/cluster"; }
idle_nodes() { timeout 5 sinfo -h -N -p main -o '%t' 2>/dev/null | grep -cxE 'idle|mix|alloc|comp' || true; }
best_mode() {
  if ! unshare --uts --mount true 2>/dev/null; then echo plain
  elif ip link add scprobe type veth peer name scprobe2 2>/dev/null; then
    ip link del scprobe
    if ip link add scprobe type bridge 2>/dev/null; then ip link del scprobe; echo netns; else echo uts; fi
  else echo uts; fi
}

install() {
  command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null &&
    command -v srun >/dev/null && command -v ip >/dev/null && return 0
  say "installing slurm and munge"
  local pol=/usr/sbin/policy-rc.d laid= rc=0   # no service may start by itself
  [ -e $pol ] || { printf '#!/bin/sh\nexit 101\n' >$pol; chmod 755 $pol; laid=1; }
  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends \
      slurmctld slurmd slurm-client munge iproute2; } >"$D.install.log" 2>&1 </dev/null || rc=$?
  [ -z "$laid" ] || rm -f $pol
  [ $rc = 0 ] || { tail -20 "$D.install.log" >&2; die "apt-get failed ($rc)"; }
}

write_conf() {
  local i me; me=$(id -un)
  {
    cat <<CONF
ClusterName=ci
SlurmctldHost=$(hostname)($(ctl_addr))
SlurmctldPort=$PORT
SlurmUser=$me
SlurmdUser=$me
AuthType=auth/munge
AuthInfo=socket=$D/munge/munge.sock,cred_expire=$REQUEUE_WAIT
CredType=cred/munge
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/run/slurmctld.pid
SlurmdPidFile=$D/run/slurmd.%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd.%n.log
MailProg=/bin/true
# nothing that needs systemd, cgroups or hardware
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
# CPUs and memory are counted only
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
GresTypes=gpu
# backfill: heterogeneous jobs need it
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=1,bf_interval=1
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# times short enough for tests
KillWait=$KILLWAIT
SlurmdTimeout=$NODE_TIMEOUT
SlurmctldTimeout=20
MessageTimeout=10
UnkillableStepTimeout=20
MinJobAge=300
$EXTRA
CONF
    for i in $(seq "$N"); do
      echo "NodeName=n$i NodeHostname=$(node_host "$i") NodeAddr=$(node_addr "$i") Port=$(node_port "$i")" \
        "CPUs=$CPUS RealMemory=$MEM Gres=gpu:$GPUS State=UNKNOWN"
    done
    echo "PartitionName=main Nodes=ALL Default=YES PriorityTier=5 PreemptMode=OFF MaxTime=INFINITE State=UP"
    echo "PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP"
    echo "PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=$GRACE MaxTime=INFINITE State=UP"
  } >"$SLURM_CONF"
  mkdir -p "$D/gpu"                      # any file passes for a GPU, as no plugin opens it
  for i in $(seq "$GPUS"); do : >"$D/gpu/gpu$i"; done
  echo "Name=gpu File=$D/gpu/gpu[1-$GPUS]" >"$D/gres.conf"
  # slurmd insists on a cgroup plugin. 22.05 (Debian 12) has no 'disabled', and there cgroup/v1 touches nothing
  # until another plugin asks it to; newer ones have 'disabled'.
  case $(slurmd -V | grep -oE '[0-9]+\.[0-9]+' | head -1) in
    19.*|20.*|21.*|22.*) echo 'CgroupPlugin=cgroup/v1' ;;
    *)                   echo 'CgroupPlugin=disabled' ;;
  esac >"$D/cgroup.conf"
  { echo "127.0.0.1 localhost"; echo "$(ctl_addr) $(hostname)"
    for i in $(seq "$N"); do echo "$(node_addr "$i") n$i"; done; } >"$D/hosts"
}

net_up() {
  [ "$MODE" = netns ] || return 0
  local i
  ip link show "$BR" >/dev/null 2>&1 || ip link add "$BR" type bridge
  ip addr replace "$NET.254/24" dev "$BR"
  ip link set "$BR" up
  for i in $(seq "$N"); do
    ip netns add "$BR-n$i"
    ip -n "$BR-n$i" link set lo up
    ip link add "${BR}v$i" type veth peer name eth0 netns "$BR-n$i"
    ip link set "${BR}v$i" master "$BR" up
    ip -n "$BR-n$i" addr add "$NET.$i/24" dev eth0
    ip -n "$BR-n$i" link set eth0 up
  done
}
net_down() {
  local i
  for i in $(ip -o link show 2>/dev/null | grep -oE " ${BR}v[0-9]+" || true); do
    ip link del "$i" 2>/dev/null || true
  done
  for i in $(ip netns list 2>/dev/null | grep -oE "^$BR-n[0-9]+" || true); do
    ip netns del "$i" 2>/dev/null || true
  done
  ip link del "$BR" 2>/dev/null || true
}

node_start() {                           # node_start I
  local i=$1
  ours "$D/run/slurmd.n$i.pid" >/dev/null && return 0
  mkdir -p "$D/spool/n$i"
  local in='hostname "$1"; mount --make-rprivate /; mount --bind "$2" /etc/hosts
            readlink /proc/self/ns/mnt >"$3"; shift 3; exec "$@"'
  local cmd=(sh -ec "$in" sh "n$i" "$D/hosts" "$D/run/ns.n$i" slurmd -f "$SLURM_CONF" -N "n$i")
  case $MODE in
    plain) slurmd -f "$SLURM_CONF" -N "n$i" ;;
    uts)   unshare --uts --mount "${cmd[@]}" ;;
    netns) nsenter --net="/run/netns/$BR-n$i" unshare --uts --mount "${cmd[@]}" ;;
  esac </dev/null >>"$D/log/slurmd.n$i.out" 2>&1 9>&- ||
    { cat "$D/log/slurmd.n$i.out" >&2; die "slurmd n$i did not start"; }
}

start() {
  local want=$1 mode=${2:-} i t0
  [[ $want =~ ^[1-9][0-9]*$ ]] && [ "$want" -le 100 ] || die "start N: N from 1 to 100"
  install
  [ -n "$mode" ] || mode=$(best_mode)
  case $mode in plain|uts|netns) ;; *) die "no mode '$mode'";; esac
  if load && [ "$N" = "$want" ] && [ "$MODE" = "$mode" ] && [ "${SIG:-}" = "$(signature)" ] &&
     ours "$D/run/slurmctld.pid" >/dev/null && [ "$(idle_nodes)" = "$N" ]; then
    say "already up: $N nodes, $MODE"; return 0
  fi
  stop                                   # another shape, half of one, or what a killed run left
  N=$want MODE=$mode
  rm -rf "$D"; mkdir -p "$D"/{munge,state,spool,log,run}; chmod 755 "$D" "$D/munge"
  printf 'N=%s\nMODE=%s\nSIG=%s\nBR=%s\n' "$N" "$MODE" "$(signature)" "$BR" >"$D/cluster"
  write_conf
  net_up
  if [ "$MODE" = plain ]; then
    [ -z "$(tail -c1 /etc/hosts)" ] || echo >>/etc/hosts
    for i in $(seq "$N"); do echo "127.0.0.1 n$i $TAG"; done >>/etc/hosts
  fi
  (umask 077; head -c 1024 /dev/urandom >"$D/munge/munge.key")
  munged --socket="$D/munge/munge.sock" --key-file="$D/munge/munge.key" --log-file="$D/munge/munged.log" \
    --pid-file="$D/munge/munged.pid" --seed-file="$D/munge/munged.seed" --num-threads=4 \
    </dev/null >"$D/log/munged.out" 2>&1 9>&- ||
    { cat "$D/log/munged.out" >&2; stop; die "munged did not start"; }
  slurmctld -f "$SLURM_CONF" </dev/null >"$D/log/slurmctld.out" 2>&1 9>&- ||
    { cat "$D/log/slurmctld.out" >&2; stop; die "slurmctld did not start"; }
  for i in $(seq "$N"); do node_start "$i"; done
  t0=$SECONDS
  until [ "$(idle_nodes)" = "$N" ]; do
    if [ $((SECONDS - t0)) -ge 30 ]; then
      sinfo -N -l -p main >&2 || true
      tail -n 15 "$D"/log/*.log >&2
      stop
      die "not all nodes came up"
    fi
    sleep 0.2
  done
  say "up: $N nodes, $MODE; export SLURM_CONF=$SLURM_CONF"
}

stop() {
  local i p was=
  if load; then
    was=1
    if ours "$D/run/slurmctld.pid" >/dev/null; then
      timeout 10 scancel --user="$(id -un)" 2>/dev/null || true
      for i in $(seq $((KILLWAIT * 5 + 25))); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.2; done
    fi
    for i in $(seq "$N"); do end "$D/run/slurmd.n$i.pid"; node_end "n$i"; done
    end "$D/run/slurmctld.pid"
    end "$D/munge/munged.pid"
  fi
  for p in $(strays); do end_pid "$p"; was=1; done
  net_down
  if grep -qF "$TAG" /etc/hosts; then    # cat keeps the inode: it may be a bind mount
    i=$(grep -vF "$TAG" /etc/hosts || true); printf '%s\n' "$i" >/etc/hosts
  fi
  rm -f "$D/cluster"                     # the logs stay until the next start
  [ -z "$was" ] || say "stopped"
}

lock() { exec 9>"$D.lock"; flock -w 120 9 || die "another start or stop is under way ($D.lock)"; }
up() { load || die "not up"; }
case ${1:-} in
  install) install ;;
  start)   [ $# -ge 2 ] || die "start N [netns|uts|plain]"; lock; start "$2" "${3:-}" ;;
  stop)    lock; stop ;;
  env)     echo "export SLURM_CONF=$SLURM_CONF" ;;
  status)  up; rc=0
           for f in munge/munged run/slurmctld $(seq -f 'run/slurmd.n%g' "$N"); do
             p=$(ours "$D/$f.pid") || { p=DOWN; rc=1; }; echo "${f#*/} $p"
           done
           sinfo -N -l -p main; [ $rc = 0 ] && [ "$(idle_nodes)" = "$N" ] ;;
  node-exec) up; n=${2:?}; shift 2
           p=$(ours "$D/run/slurmd.$n.pid") || die "$n is down"
           case $MODE in plain) exec "$@";; *) exec nsenter -t "$p" --uts --mount --net "$@";; esac ;;
  node-kill)  up; [ -s "$D/run/slurmd.${2:?}.pid" ] || die "$2 is down"; node_end "$2" ;;
  node-start) up; node_start "${2#n}" ;;
  node-net)   up; [ "$MODE" = netns ] || die "node-net needs netns mode"; ip link set "${BR}v${2#n}" "${3:?}" ;;
  *) sed -n '2,/^set -/p' "$0" | grep '^#' | sed 's/^# \?//'; exit 2 ;;
esac
