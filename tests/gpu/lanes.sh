# shellcheck shell=bash
# Sections in lanes: those of one lane run one after the other, lanes beside each other. A section is a function
# `section_NAME` of checks; a check is a command with a limit and a log.
#
# The script that reads this sets `logs` (a folder), `end` (when everything must have ended, in SECONDS), `limits` (the
# seconds that each section may take) and `stretch` (what a second of a check's limit counts, in percent). What a section
# leaves over belongs to those after it.

# What came of the checks of each section, a file a section: lines have one order, whoever ended first.
outcomes=$(mktemp -d)
# Of a lane: the section that it is in, when that must have ended, and the check that runs.
section='' section_end=0 running=''
# Seconds that a check has to end when it is told to, its processes when it has ended, and the system to kill them: as
# much may come after `end`.
grace=5 linger=2 patience=15

# The seconds that sections may take one after the other: SECTION...
seconds_of() {
    local name sum=0
    for name; do sum=$((sum + ${limits[$name]})); done
    echo "$sum"
}

# The seconds that lanes may take, each the names of its sections as one word: LANE...
longest() {
    local lane names seconds most=0
    for lane; do
        read -ra names <<<"$lane"
        seconds=$(seconds_of "${names[@]}")
        most=$((seconds > most ? seconds : most))
    done
    echo "$most"
}

# When what begins now must have ended: OWN LATER UNTIL, the seconds that it may take, those that all after it may
# take, and when these must have ended. With too little time, the first have theirs.
due() {
    local at=$(($3 - $2)) least=$((SECONDS + $1))
    ((at > least)) || at=$least
    echo $((at < $3 ? at : $3))
}

# Runs lanes beside each other and waits for all: LATER LANE..., the seconds that what comes after them may take.
beside() {
    local later=$1 lane until names
    shift
    until=$(due "$(longest "$@")" "$later" "$end")
    for lane; do
        read -ra names <<<"$lane"
        ((${#names[@]} == 0)) || in_order "$until" "${names[@]}" &
    done
    wait
}

# A lane: UNTIL SECTION...
in_order() {
    local until=$1
    shift
    # A terminal that goes tells the lanes too; of Ctrl-C what is in the background hears nothing.
    trap stop_lane TERM HUP
    while (($# > 0)); do
        section=$1
        shift
        section_end=$(due "${limits[$section]}" "$(seconds_of "$@")" "$until")
        "section_$section"
        touch "$outcomes/$section.complete"
    done
}

# A line on the present section: NAME OUTCOME.
line() { printf '%-24s %s\n' "$1" "$2" >>"$outcomes/$section"; }

# The seconds that a check of this limit may take now: LIMIT
allowed() {
    local left=$((section_end - SECONDS)) limit=$(($1 * stretch / 100))
    echo $((limit < left ? limit : left))
}

# A check with a name and a limit in seconds; its output goes to a log of that name: NAME LIMIT COMMAND...
check() {
    local name=$1 limit began=$SECONDS outcome status
    limit=$(allowed "$2")
    shift 2
    if ((section_end - SECONDS < 3)); then
        line "$name" "NOT RUN: no time left"
        return
    fi
    running=$name
    # In the background, so that the lane can be stopped meanwhile.
    GPU_CHECK=$$/$name timeout --kill-after="$grace" "$limit" "$@" >"$logs/$name.log" 2>&1 &
    wait $!
    status=$?
    end_processes "$name" "$linger"
    running=''
    case $status in
        0) outcome=ok ;;
        124 | 137) outcome="FAILED after $limit s" ;;
        *) outcome="FAILED ($status)" ;;
    esac
    # A test that found no GPU passes without having run.
    grep -q SKIPPED "$logs/$name.log" && outcome="FAILED (skipped)"
    line "$name" "$(printf '%-22s %4d s' "$outcome" $((SECONDS - began)))"
    [[ $outcome == ok ]] || printf '%s\n' "--- $name: $outcome" "$(tail -n 25 "$logs/$name.log")"
}

# Sees to it that no process of a check lives on: NAME SECONDS, for which they may still end by themselves. All have
# its mark in their environment, also those that left its process group.
end_processes() {
    local name=$1 kill_at=$((SECONDS + $2)) pids
    while
        mapfile -t pids < <(grep -lszxF "GPU_CHECK=$$/$name" /proc/[0-9]*/environ | grep -o '[0-9]\+')
        ((${#pids[@]} > 0))
    do
        if ((SECONDS >= kill_at + patience)); then
            line "$name" "FAILED: cannot be killed: processes ${pids[*]}"
            return
        fi
        ((SECONDS < kill_at)) || kill -KILL "${pids[@]}" 2>/dev/null
        sleep 0.1
    done
}

# Tells the children of this shell to end: the lanes, or the check of a lane.
tell_children() {
    local children
    children=$(jobs -p)
    # shellcheck disable=SC2086 # A word a process.
    [[ -z $children ]] || kill -TERM $children 2>/dev/null
}

# The end of a lane that is told to end.
stop_lane() {
    trap '' TERM HUP
    tell_children
    if [[ -n $running ]]; then
        end_processes "$running" $((grace + 1))
        line "$running" "FAILED (stopped)"
    fi
    wait
    exit 1
}

# The end of all lanes.
stop_lanes() {
    tell_children
    wait
}

# All lines on these sections, in this order, and what was stopped before its end: SECTION...
lines_of() {
    local name lines
    for name; do
        lines=$outcomes/$name
        [[ ! -f $lines ]] || cat "$lines"
        if [[ ! -f $lines.complete ]]; then
            printf '%-24s %s\n' "$name$([[ -f $lines ]] && echo ", the rest")" "NOT RUN: stopped"
        fi
    done
}
