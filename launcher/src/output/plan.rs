//! Which of the workers' output goes to the console, under which prefix, and which lines are written a second time.

use std::collections::{BTreeMap, BTreeSet};

use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::{GlobalRank, LocalRank};

use crate::output::streams::Stream;

/// Some of a worker's two output streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamSet {
    /// Standard output.
    pub stdout: bool,
    /// Standard error.
    pub stderr: bool,
}

impl StreamSet {
    const fn has(self, stream: Stream) -> bool {
        [self.stdout, self.stderr][stream as usize]
    }
}

/// A set of streams for every local rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamsByRank {
    /// The same for all.
    All(StreamSet),
    /// By local rank; none for those that are not listed.
    Listed(BTreeMap<u32, StreamSet>),
}

impl Default for StreamsByRank {
    fn default() -> Self {
        Self::All(StreamSet::default())
    }
}

impl StreamsByRank {
    fn has(&self, local_rank: LocalRank, stream: Stream) -> bool {
        match self {
            Self::All(set) => set.has(stream),
            Self::Listed(sets) => sets.get(&local_rank.0).is_some_and(|set| set.has(stream)),
        }
    }
}

/// What happens to the output of the workers. The default: all of it on the console, under `[rank] `.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutputPlan {
    /// `--redirects`: only to the log files.
    pub redirects: StreamsByRank,
    /// `--tee`: to the log files and the console, whatever `redirects` says.
    pub tee: StreamsByRank,
    /// `--local-ranks-filter`: only these are shown on the console.
    pub local_ranks: Option<BTreeSet<u32>>,
    /// `--global-ranks-filter`: only these are shown on the console.
    pub global_ranks: Option<BTreeSet<u32>>,
    /// `--log-line-prefix-template`
    pub prefix: PrefixTemplate,
    /// `--log-max-mb`: from this size on, a log file begins anew, beside its predecessor.
    pub log_max_bytes: Option<u64>,
    /// `--duplicate-stdout-filters`: lines that contain one of these go to `filtered_stdout.log` of the attempt too.
    pub stdout_filters: Vec<String>,
    /// `--duplicate-stderr-filters`: the same for `filtered_stderr.log`.
    pub stderr_filters: Vec<String>,
    /// The only worker of the job is given the launcher's own streams, which are terminals: nothing of its output is
    /// seen by the launcher.
    pub direct: bool,
    /// `--output raw`: the workers that are shown are given the launcher's own streams, without log files.
    pub raw: bool,
}

impl OutputPlan {
    /// True if a stream of a worker is shown on the console.
    pub(crate) fn shows(&self, rank: GlobalRank, local_rank: LocalRank, stream: Stream) -> bool {
        let kept = !self.redirects.has(local_rank, stream) || self.tee.has(local_rank, stream);
        kept && among(self.local_ranks.as_ref(), local_rank.0) && among(self.global_ranks.as_ref(), rank.0)
    }

    /// True if a worker is given the launcher's own streams.
    pub(crate) fn hands_over(&self, rank: GlobalRank, local_rank: LocalRank) -> bool {
        self.direct || self.raw && self.shows(rank, local_rank, Stream::Stdout)
    }

    /// True if the launcher sees what the workers print, and may print lines of its own between.
    pub(crate) fn is_seen(&self) -> bool {
        !self.direct && !self.raw
    }

    /// How many of this node's workers may be shown; `alone`: their ranks are their local ranks.
    pub fn most_shown(&self, workers: u32, alone: bool) -> u32 {
        let shown = (0..workers)
            .filter(|rank| {
                among(self.local_ranks.as_ref(), *rank)
                    && (!alone || among(self.global_ranks.as_ref(), *rank))
            })
            .count();
        let most = self.global_ranks.as_ref().map_or(shown, BTreeSet::len);
        shown.min(most) as u32
    }

    /// True if something goes to log files that the console does not show.
    pub fn needs_files(&self) -> bool {
        let none = StreamsByRank::default();
        self.redirects != none
            || self.tee != none
            || !self.stdout_filters.is_empty()
            || !self.stderr_filters.is_empty()
    }
}

fn among(filter: Option<&BTreeSet<u32>>, rank: u32) -> bool {
    filter.is_none_or(|ranks| ranks.contains(&rank))
}

/// Stands in a prefix for the time at which a line was read.
pub(crate) const TIME: &str = "${time}";

/// What precedes every line of a worker: `[${role_name}${local_rank}]: `, as torchrun reads it. `$rank` is `${rank}`, `$$`
/// is a dollar sign, and what is no known variable is text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixTemplate(String);

impl Default for PrefixTemplate {
    fn default() -> Self {
        Self("[${rank}] ".into())
    }
}

impl PrefixTemplate {
    /// Every text is a template.
    pub fn new(template: &str) -> Self {
        Self(template.to_owned())
    }

    /// The prefix of one worker, with all that stands between it and the text.
    pub(crate) fn of(&self, worker: &WorkerEnv, hostname: &str) -> String {
        substitute(&self.0, |name| match name {
            "rank" => Some(worker.rank.to_string()),
            "local_rank" => Some(worker.local_rank.to_string()),
            "role_name" => Some(worker.role.clone()),
            "hostname" => Some(hostname.to_owned()),
            "time" => Some(TIME.to_owned()),
            _ => None,
        })
    }
}

/// `template` with `$name` and `${name}` replaced by the `value` of the name, as Python's `safe_substitute`: `$$` is a
/// dollar sign, and a name without a value is text.
pub(crate) fn substitute(template: &str, value: impl Fn(&str) -> Option<String>) -> String {
    let (mut text, mut rest) = (String::new(), template);
    while let Some((before, after)) = rest.split_once('$') {
        text.push_str(before);
        if let Some(after) = after.strip_prefix('$') {
            text.push('$');
            rest = after;
            continue;
        }
        let name = variable(after);
        match value(name.trim_matches(['{', '}'])) {
            Some(value) => text.push_str(&value),
            None => text.extend(["$", name]),
        }
        rest = &after[name.len()..];
    }
    text + rest
}

/// The name of a variable that `after` begins with, perhaps in braces; empty without one.
fn variable(after: &str) -> &str {
    let is_of_name = |c: char| c == '_' || c.is_ascii_alphanumeric();
    if let Some((name, _)) = after.strip_prefix('{').and_then(|braced| braced.split_once('}'))
        && !name.is_empty()
        && name.chars().all(is_of_name)
    {
        return &after[..name.len() + 2];
    }
    let end = after.find(|c| !is_of_name(c)).unwrap_or(after.len());
    &after[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_arguments_are_replaced_as_torchrun_does() {
        let of = |text: &str| substitute(text, |name| (name == "local_rank").then(|| "3".to_owned()));
        assert_eq!(of("--gpu=${local_rank}"), "--gpu=3");
        assert_eq!(of("$local_rank/$local_rank_2"), "3/$local_rank_2");
        assert_eq!(of("${LOCAL_RANK} ${rank} $"), "${LOCAL_RANK} ${rank} $");
        assert_eq!(of("$$local_rank costs $$1"), "$local_rank costs $1");
    }

    const BOTH: StreamSet = StreamSet {
        stdout: true,
        stderr: true,
    };

    fn shown(plan: &OutputPlan, rank: u32, local_rank: u32) -> (bool, bool) {
        let shows = |stream| plan.shows(GlobalRank(rank), LocalRank(local_rank), stream);
        (shows(Stream::Stdout), shows(Stream::Stderr))
    }

    #[test]
    fn all_is_shown_by_default() {
        let plan = OutputPlan::default();
        assert_eq!(shown(&plan, 3, 1), (true, true));
        assert!(!plan.needs_files());
    }

    #[test]
    fn what_is_redirected_is_not_shown_unless_it_is_teed() {
        let plan = OutputPlan {
            redirects: StreamsByRank::All(BOTH),
            tee: StreamsByRank::Listed(BTreeMap::from([(
                12,
                StreamSet {
                    stdout: false,
                    stderr: true,
                },
            )])),
            ..OutputPlan::default()
        };
        assert_eq!(shown(&plan, 0, 0), (false, false));
        assert_eq!(shown(&plan, 12, 12), (false, true));
        assert!(plan.needs_files());
    }

    #[test]
    fn filters_name_the_ranks_that_are_shown() {
        let plan = OutputPlan {
            local_ranks: Some(BTreeSet::from([0, 1])),
            global_ranks: Some(BTreeSet::from([4])),
            ..OutputPlan::default()
        };
        assert_eq!(shown(&plan, 4, 0), (true, true));
        assert_eq!(shown(&plan, 5, 1), (false, false));
        assert_eq!(shown(&plan, 4, 2), (false, false));
    }

    #[test]
    fn the_ranks_of_several_nodes_may_all_be_on_this_one() {
        let shown = |local: &[u32], global: &[u32], alone| {
            let filter = |ranks: &[u32]| (!ranks.is_empty()).then(|| ranks.iter().copied().collect());
            let plan = OutputPlan {
                local_ranks: filter(local),
                global_ranks: filter(global),
                ..OutputPlan::default()
            };
            plan.most_shown(4, alone)
        };
        assert_eq!((shown(&[], &[], true), shown(&[2], &[], true)), (4, 1));
        assert_eq!((shown(&[], &[1, 5], true), shown(&[], &[1, 5], false)), (1, 2));
        assert_eq!((shown(&[3], &[1, 3], false), shown(&[3], &[1], true)), (1, 0));
    }

    #[test]
    fn prefixes_follow_their_template() {
        let worker = WorkerEnv {
            rank: GlobalRank(11),
            local_rank: LocalRank(3),
            role: "trainer".into(),
            ..WorkerEnv::single()
        };
        let of = |template: &str| PrefixTemplate::new(template).of(&worker, "node7");
        assert_eq!(of("[${role_name}${local_rank}]:"), "[trainer3]:");
        assert_eq!(of("${rank}"), "11");
        assert_eq!(of("$time ${rank} "), "${time} 11 ", "filled in line by line");
        assert_eq!(of("${hostname}:${rank}: "), "node7:11: ");
        assert_eq!(of("$role_name/$rank $ranks $"), "trainer/11 $ranks $");
        assert_eq!(of("$$rank ${group_rank} ${rank"), "$rank ${group_rank} ${rank");
        assert_eq!(of("${} ${a b}$"), "${} ${a b}$");
        assert_eq!(PrefixTemplate::default().of(&worker, "node7"), "[11] ");
    }
}
