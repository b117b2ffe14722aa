# What train.sbatch and frontier.sbatch have in common: train.py under srun, then the end of the job or its requeueing.
# They source this file; `here` is its folder.
#
# Exit codes of train.py: 0 done, 2 a mistake of the user's, 85 asked to stop and saved, 86 another process was lost,
# 87 numbers went bad. What is none of these is a failure of one process: an exception, a signal.

# How often in a row a job is requeued without a new checkpoint in between: one that failed, and one that was stopped.
MAX_FAILURES=3
MAX_STOPS=10
# More words for srun.
SRUN_OPTIONS=()

say() { echo "$(date '+%F %T') job $SLURM_JOB_ID: $*"; }

train() { # [GIN_FILE]... [FLAG]...
  local arguments=() name=quickstart run_dir= argument report code ends
  for argument; do
    case $argument in
      --gin_file) continue ;;
      --gin.RUN_DIR=*) run_dir=$(unquoted "${argument#*=}") ;;
      --gin_file=*) name=$(name_of "${argument#*=}") ;;
      -*) ;;
      *) name=$(name_of "$argument") argument=--gin_file=$argument ;;
    esac
    arguments+=("$argument")
  done
  if [ -z "$run_dir" ]; then
    run_dir=runs/$name-$SLURM_JOB_ID
    arguments+=("--gin.RUN_DIR=$run_dir")
  fi
  if [ -f "$here/site.sh" ]; then . "$here/site.sh"; fi
  # srun by itself does not take over what sbatch was told.
  if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

  # Sent to the whole job, SIGTERM is for the processes; this script waits for them.
  trap : TERM
  say "$run_dir on $SLURM_JOB_NODELIST, $SLURM_NTASKS processes, start $((${SLURM_RESTART_COUNT:-0} + 1))"
  report=$(mktemp)
  srun --kill-on-bad-exit=1 "${SRUN_OPTIONS[@]}" python -u "$here/../../train.py" "${arguments[@]}" \
    2> >(tee "$report" >&2)
  code=$?
  # What srun said of the tasks may still be on its way.
  wait $!
  ends=$(ends_of_tasks "$report")
  rm -f "$report"
  decide "$code" "$run_dir" "$ends"
}

unquoted() { sed -E "s/^[\"' ]+//; s/[\"' ]+$//; s|^~/|$HOME/|" <<<"$1"; }

name_of() { basename -- "$1" .gin; }

ends_of_tasks() { # REPORT: how tasks ended other than well, each kind once: 'code 86', 'Killed', 'Node failure'
  # srun's own exit code will not do: it is the greatest of all, and the tasks that it ended because of another count
  # as 128 + SIGTERM.
  sed -nE 's/^srun: error: .*: tasks? [-0-9,]+: (.*)$/\1/p; s/^srun: error: (Node failure) on .*/\1/p' "$1" |
    sed -E 's/^Exited with exit code /code /; s/ \(core dumped\)$//' | sort -u
}

decide() { # CODE RUN_DIR ENDS: ends the job or requeues it
  local code=$1 run_dir=$2 ends=$3 list
  list=$(paste -sd, <<<"${ends:-code $code}" | sed 's/,/, /g')
  if [ "$code" = 0 ]; then
    say "done"
    exit 0
  elif [ "$(job_state)" != RUNNING ]; then
    # Cancelled, out of time, or requeued by another hand; to requeue it now would undo a scancel.
    say "cancelled, out of time, or requeued by SLURM ($list): not requeued here"
    exit "$code"
  elif grep -qx 'code 2' <<<"$ends"; then
    say "a mistake in the settings or the set-up, said above ($list): not requeued"
    exit 2
  elif grep -qx 'code 87' <<<"$ends"; then
    say "the numbers went bad, as said above ($list): not requeued"
    exit 87
  elif [ -n "$ends" ] && ! grep -qvxE 'code 85|Terminated' <<<"$ends"; then
    requeue_if_useful "stopped as asked ($list)" "$MAX_STOPS"
  else
    requeue_if_useful "failed ($list)" "$MAX_FAILURES"
  fi
}

job_state() { scontrol show job "$SLURM_JOB_ID" | sed -nE 's/^ *JobState=([A-Z_]+).*/\1/p'; }

requeue_if_useful() { # WHAT MAX: requeues unless it ended MAX times in a row without a new checkpoint
  local step
  step=$(newest_checkpoint "$run_dir")
  local saved="the newest checkpoint is step $step"
  [ "$step" != -1 ] || saved="there is no checkpoint"
  if may_end_again "$run_dir" "$2"; then
    say "$1: requeued; $saved, end $failures of at most $2 there"
    requeue
  else
    say "$1: not requeued; $saved, and $failures ends in a row brought no new one"
    exit "$code"
  fi
}

may_end_again() { # RUN_DIR MAX: counts this end in the file RUN_DIR.failures; false where there were too many
  local job= step= newest file=$1.failures
  newest=$(newest_checkpoint "$1")
  failures=0
  if [ -f "$file" ]; then read -r job step failures <"$file"; fi
  # Of another job, damaged, or before the newest checkpoint: it counts no more.
  [[ $job = "$SLURM_JOB_ID" && $step =~ ^-?[0-9]+$ && $failures =~ ^[0-9]+$ && $newest -le $step ]] || failures=0
  failures=$((failures + 1))
  # What cannot be counted is not repeated.
  mkdir -p "$(dirname "$file")" && echo "$SLURM_JOB_ID $newest $failures" >"$file.part" && mv "$file.part" "$file" &&
    [ "$failures" -le "$2" ]
}

newest_checkpoint() { # RUN_DIR: its step, -1 if there is none; an unfinished checkpoint has no number for a name
  local newest
  newest=$(ls "$1/checkpoints" 2>/dev/null | grep -xE '[0-9]+' | sort -n | tail -n 1)
  echo "${newest:--1}"
}

requeue() {
  trap - TERM
  if ! scontrol requeue "$SLURM_JOB_ID"; then
    say "SLURM does not requeue this job; submit it again with --gin.RUN_DIR=$run_dir to go on"
    exit 1
  fi
  # SLURM ends this script. Ended by itself, the job would count as finished.
  sleep 300
}
