//! Where a run goes on when a generation begins: at the state that its ranks still have in memory, or at the latest
//! checkpoint.
//!
//! A rank updates parameters in step `t` only behind a barrier that follows the last reduction of the step. So if one rank
//! has updated, each of the others has either updated too, or has its sums and the norm, and can finish the step alone (on
//! a GPU, whose results are read a step later, it gets the state of one that has). Every rank reports what it holds ([`Held`]). [`decide`] is a pure function of all reports: all ranks decide the same.
//!
//! The newest [`Version`] counts. Ranks that hold it keep it, and give it to those that do not: in each state group, the
//! lowest holder among the copies. Where there are no copies, a buddy may keep one (`train.recovery: buddy`), of the same
//! version as its own part. If a shard has no holder, all ranks read the checkpoint.

use std::fmt;

use ddp_proto::words::numbered;
use serde::{Deserialize, Serialize};

use crate::checkpoint::Batch;
use crate::mesh::{Axis, MeshShape};
use crate::metrics::MetricsLine;

/// A state of the run. A later generation counts more than a later step: a node that was cut off may have finished a step
/// that the others did once more, on other ranks and with other bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Version {
    /// The generation in which the last of its steps was updated, or which read it from a checkpoint or made it from the
    /// seed. A rank that receives state takes over its version.
    pub generation: u64,
    /// Finished steps.
    pub step: u64,
}

/// Which part of the state a rank holds: the ranks along each axis, and its index among them, in the order of
/// [`Axis::ALL`]. Along `replicate` ranks hold copies. Only the number of sharded copies matters there, because buckets are
/// padded to a multiple of all data-parallel ranks before they are cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place(Vec<Coordinate>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Coordinate {
    size: usize,
    index: usize,
}

impl Place {
    /// That of a rank.
    pub fn of(mesh: &MeshShape, rank: usize) -> Self {
        let coordinate = |axis| match axis {
            Axis::Replicate if mesh.sharded().is_empty() => Coordinate { size: 1, index: 0 },
            Axis::Replicate => Coordinate {
                size: mesh.size(&[axis]),
                index: 0,
            },
            _ => Coordinate {
                size: mesh.size(&[axis]),
                index: mesh.index(rank, &[axis]),
            },
        };
        Self(Axis::ALL.map(coordinate).to_vec())
    }

    /// Whether both are parts of a state that is divided in the same way.
    fn fits(&self, other: &Self) -> bool {
        let sizes = |place: &Self| place.0.iter().map(|at| at.size).collect::<Vec<_>>();
        sizes(self) == sizes(other)
    }
}

/// As in `pipeline 0 of 2, shard 3 of 4`; or `all of it`.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes = Axis::ALL.into_iter().zip(&self.0);
        let parts = axes.filter(|(axis, at)| at.size > 1 && *axis != Axis::Replicate);
        let words: Vec<String> = parts
            .map(|(axis, at)| format!("{} {} of {}", axis.name(), at.index, at.size))
            .collect();
        f.write_str(if words.is_empty() { "all of it" } else { "" })?;
        f.write_str(&words.join(", "))
    }
}

/// What a rank has kept of the state in memory: its report when a generation begins. A rank that holds nothing whole, for
/// example because an update was broken off, reports nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Held {
    /// That of its parameters and of the optimizer's state.
    pub version: Version,
    /// The version that it can reach alone: it has the sums and the norm of the step behind `version`, and has asked the
    /// other ranks for theirs, in this generation.
    pub unfinished: Option<Version>,
    /// Updates so far: steps without those that were skipped. A rank that finishes a step updates only if the version to go
    /// on at has more.
    pub updates: u64,
    /// Samples consumed.
    pub samples: u64,
    /// The batch of these steps, as in a checkpoint.
    pub batch: Option<Batch>,
    /// Which part of the state.
    pub place: Place,
    /// The part of which it keeps a copy at the same version, as a buddy.
    pub copy_of: Option<Place>,
    /// The numbers of the last step of `version`, if this rank has read them.
    pub line: Option<MetricsLine>,
}

impl Held {
    /// Whether it is at `version`, or can finish the step that leads there.
    fn reaches(&self, version: Version) -> bool {
        self.version == version || self.unfinished == Some(version)
    }
}

/// Where all ranks go on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Decision {
    /// At the newest state in memory.
    GoOn(Box<GoOn>),
    /// At the latest checkpoint, or at the beginning.
    Reload {
        /// Why not at the state in memory, for the user. `None`: no rank holds any, as in a first generation.
        reason: Option<String>,
    },
}

/// The newest state in memory, and which ranks hold it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GoOn {
    /// The report of a rank that is at this version: one that knows the validation loss of the step, if there is one, else
    /// one that knows its other numbers. `place` and `unfinished` are those of that rank.
    pub state: Held,
    /// For each rank, whether it holds its part, or can finish the step that leads to it.
    pub holders: Vec<bool>,
}

impl GoOn {
    /// The rank that gives its part of the state to those of `copies` that hold nothing. They hold copies of that part.
    pub fn source(&self, copies: &[usize]) -> Option<usize> {
        copies.iter().copied().find(|&rank| self.holders[rank])
    }
}

/// Decides from the reports of all ranks of `mesh`, in their order, when `generation` begins. `groups` are the axes of each
/// [`crate::parallel::StateGroup`], and `latest` is the step of the latest checkpoint.
///
/// Of a checkpoint and a state in memory of the same step, the state counts only if it is of the generation before. Others
/// may have left an older one behind, and saved what they made of that step.
pub fn decide(
    reports: &[Option<Held>],
    mesh: &MeshShape,
    groups: &[Vec<Axis>],
    latest: Option<u64>,
    generation: u64,
) -> Decision {
    let reload = |reason| Decision::Reload { reason };
    let held = || reports.iter().flatten();
    let Some(newest) = held().map(|held| held.version).max() else {
        return reload(None);
    };
    let Version { generation: of, step } = newest;
    if let Some(saved) = latest.filter(|saved| *saved > step || (*saved == step && of + 1 < generation)) {
        return reload(Some(format!(
            "the latest checkpoint is of step {saved}, the newest state in memory of step {step} in generation {of}"
        )));
    }
    let is_holder = |(rank, held): (usize, &Option<Held>)| {
        (held.as_ref()).is_some_and(|held| held.reaches(newest) && held.place == Place::of(mesh, rank))
    };
    let holders: Vec<bool> = reports.iter().enumerate().map(is_holder).collect();
    for rank in (0..holders.len()).filter(|&rank| !holders[rank]) {
        for axes in groups {
            let copies = mesh.members(rank, &mesh.copied_along(axes));
            let part = Place::of(mesh, rank);
            let is_copied = holders.iter().zip(reports).any(|(&is_holder, held)| {
                is_holder
                    && held
                        .as_ref()
                        .is_some_and(|held| held.copy_of.as_ref() == Some(&part))
            });
            if !is_copied && !copies.iter().any(|&copy| holders[copy]) {
                return reload(Some(lost(reports, newest, &copies, mesh)));
            }
        }
    }
    let knows = |held: &&Held| (held.line.as_ref()).map_or(0, |line| 1 + u8::from(line.val_loss.is_some()));
    let at_newest = held().filter(|held| held.version == newest);
    let Some(state) = at_newest.rev().max_by_key(knows) else {
        return reload(None);
    };
    Decision::GoOn(Box::new(GoOn {
        state: state.clone(),
        holders,
    }))
}

/// Which part of the newest state no rank holds, in words. It belongs on the ranks `copies`.
fn lost(reports: &[Option<Held>], newest: Version, copies: &[usize], mesh: &MeshShape) -> String {
    let part = &Place::of(mesh, copies[0]);
    let lost = format!(
        "after step {}, no rank has the state of {} in memory ({part})",
        newest.step,
        numbered("rank", copies)
    );
    let elsewhere = reports.iter().enumerate().find_map(|(rank, held)| {
        let held = (held.as_ref()).filter(|held| held.reaches(newest) && !held.place.fits(part))?;
        let place = &held.place;
        Some(format!(
            "; rank {rank} has that of another number of ranks ({place})"
        ))
    });
    let has_buddy = reports.iter().flatten().any(|held| held.copy_of.is_some());
    let buddy = has_buddy.then(|| format!("; its buddy is rank {}", mesh.buddies(copies[0]).buddy));
    lost + &elsewhere.or(buddy).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use ddp_proto::env::WorkerEnv;
    use ddp_proto::ids::WorldSize;

    use super::*;
    use crate::config::{Parallel, ShardGroup, Strategy};
    use crate::mesh::GRADIENTS;

    fn mesh(ranks: u32, parallel: &Parallel) -> MeshShape {
        let env = WorkerEnv {
            world_size: WorldSize(ranks),
            local_world_size: ranks,
            ..WorkerEnv::single()
        };
        MeshShape::new(parallel, &env).unwrap()
    }

    fn ddp(ranks: u32) -> MeshShape {
        mesh(ranks, &Parallel::default())
    }

    /// Two shards in copies, or all ranks' shards.
    fn sharded(ranks: u32, shard_group: Option<usize>) -> MeshShape {
        let parallel = Parallel {
            strategy: Strategy::Zero2,
            shard_group: shard_group.map(ShardGroup::Ranks),
            ..Parallel::default()
        };
        mesh(ranks, &parallel)
    }

    fn version(text: &str) -> Version {
        let (generation, step) = text.split_once(':').unwrap();
        let [generation, step] = [generation, step].map(|number| number.parse().unwrap());
        Version { generation, step }
    }

    /// Reports of the ranks of a mesh: nothing (`-`), a version (`1:5`), or one that leads to another (`1:5>1:6`). A `+`
    /// stands before that of a rank that is a buddy.
    fn reports(mesh: &MeshShape, text: &str) -> Vec<Option<Held>> {
        let held = |(rank, text): (usize, &str)| {
            let owner = mesh.buddies(rank).owner;
            let copy_of = text.starts_with('+').then(|| Place::of(mesh, owner));
            let text = text.trim_start_matches('+');
            let (at, unfinished) = text
                .split_once('>')
                .map_or((text, None), |(at, to)| (at, Some(version(to))));
            let version = (at != "-").then(|| version(at))?;
            Some(Held {
                unfinished,
                updates: version.step,
                samples: 2 * version.step,
                batch: None,
                place: Place::of(mesh, rank),
                copy_of,
                line: None,
                version,
            })
        };
        text.split(' ').enumerate().map(held).collect()
    }

    /// Of generation 3: as in `1:5 of ranks 0, 2`, the version and its holders; or the reason for the checkpoint.
    fn decided(then: &MeshShape, now: &MeshShape, text: &str, latest: Option<u64>) -> String {
        let mut reports = reports(then, text);
        reports.resize(now.ranks(), None);
        let experts = [Axis::Replicate, Axis::Shard].to_vec();
        match decide(&reports, now, &[GRADIENTS.to_vec(), experts], latest, 3) {
            Decision::GoOn(go_on) => {
                let GoOn { state, holders } = *go_on;
                let holders: Vec<usize> = (0..now.ranks()).filter(|&rank| holders[rank]).collect();
                let Version { generation, step } = state.version;
                assert_eq!((state.updates, state.samples), (step, 2 * step));
                format!("{generation}:{step} of {}", numbered("rank", &holders))
            }
            Decision::Reload { reason } => reason.unwrap_or_else(|| "nothing".into()),
        }
    }

    #[test]
    fn ranks_go_on_at_the_newest_state_that_each_set_of_copies_has() {
        let hsdp = sharded(4, Some(2));
        let experts = mesh(
            4,
            &Parallel {
                expert: 2,
                ..Parallel::default()
            },
        );
        let pair = ddp(2);
        for (mesh, reports, wanted) in [
            (&pair, "- -", "nothing"),
            (&pair, "1:5 1:5", "1:5 of ranks 0, 1"),
            (&pair, "- 1:5", "1:5 of rank 1"),
            // No rank has updated: all begin the step again.
            (&pair, "1:4>1:5 1:4", "1:4 of ranks 0, 1"),
            (&pair, "1:4>1:5 1:5", "1:5 of ranks 0, 1"),
            (&pair, "1:4 1:5", "1:5 of rank 1"),
            // The state was kept from the generation before.
            (&pair, "1:4>2:5 2:5", "2:5 of ranks 0, 1"),
            (&pair, "1:4>1:5 2:5", "2:5 of rank 1"),
            (&pair, "1:6 2:5", "2:5 of rank 1"),
            (&hsdp, "- 1:5 1:5 -", "1:5 of ranks 1, 2"),
            (&hsdp, "- 1:4>1:5 1:5 -", "1:5 of ranks 1, 2"),
            (
                &hsdp,
                "- 1:5 - 1:5",
                "after step 5, no rank has the state of ranks 0, 2 in memory (shard 0 of 2)",
            ),
            (
                &hsdp,
                "1:5 1:4 1:5 1:4",
                "after step 5, no rank has the state of ranks 1, 3 in memory (shard 1 of 2)",
            ),
            (&experts, "- 1:5 1:5 -", "1:5 of ranks 1, 2"),
            (
                &experts,
                "- 1:5 - 1:5",
                "after step 5, no rank has the state of ranks 0, 2 in memory (expert 0 of 2)",
            ),
            (
                &sharded(2, None),
                "1:5 -",
                "after step 5, no rank has the state of rank 1 in memory (shard 1 of 2)",
            ),
        ] {
            assert_eq!(decided(mesh, mesh, reports, Some(3)), wanted, "{reports}");
        }
    }

    #[test]
    fn a_buddy_stands_in_for_a_rank_that_no_other_is_a_copy_of() {
        let four = sharded(4, None);
        for (reports, wanted) in [
            ("- +1:5 +1:5 +1:5", "1:5 of ranks 1 to 3"),
            ("- +1:4>1:5 +1:5 +1:5", "1:5 of ranks 1 to 3"),
            ("+1:4 +1:5 +1:5 +1:5", "1:5 of ranks 1 to 3"),
            ("- +1:5 - +1:5", "1:5 of ranks 1, 3"),
            (
                "+1:5 - - +1:5",
                "after step 5, no rank has the state of rank 1 in memory (shard 1 of 4); its buddy is rank 2",
            ),
            (
                "- +1:4 +1:5 +1:5",
                "after step 5, no rank has the state of rank 0 in memory (shard 0 of 4); its buddy is rank 1",
            ),
            // It has not received its copy yet.
            (
                "- 1:5 +1:5 +1:5",
                "after step 5, no rank has the state of rank 0 in memory (shard 0 of 4); its buddy is rank 1",
            ),
        ] {
            assert_eq!(decided(&four, &four, reports, Some(3)), wanted, "{reports}");
        }
        assert_eq!(
            decided(&four, &sharded(3, None), "+1:5 +1:5 +1:5 -", None),
            "after step 5, no rank has the state of rank 0 in memory (shard 0 of 3); rank 0 has that of another number of ranks (shard 0 of 4)"
        );
    }

    #[test]
    fn a_newer_checkpoint_and_another_division_of_the_state_lead_to_the_checkpoint() {
        assert_eq!(
            decided(&ddp(2), &ddp(2), "1:5 1:5", Some(6)),
            "the latest checkpoint is of step 6, the newest state in memory of step 5 in generation 1"
        );
        // The ranks of generation 2 may have saved another one.
        assert_eq!(
            decided(&ddp(2), &ddp(2), "1:5 -", Some(5)),
            "the latest checkpoint is of step 5, the newest state in memory of step 5 in generation 1"
        );
        assert_eq!(decided(&ddp(2), &ddp(2), "2:5 -", Some(5)), "2:5 of rank 0");
        assert_eq!(decided(&ddp(2), &ddp(3), "1:5 1:5", None), "1:5 of ranks 0, 1");
        assert_eq!(
            decided(&sharded(2, None), &sharded(3, None), "1:5 1:5", None),
            "after step 5, no rank has the state of rank 0 in memory (shard 0 of 3); rank 0 has that of another number of ranks (shard 0 of 2)"
        );
        // Other buckets, so other slices of them.
        assert_eq!(
            decided(&sharded(2, Some(2)), &sharded(4, Some(2)), "1:5 1:5", None),
            "after step 5, no rank has the state of ranks 0, 2 in memory (shard 0 of 2); rank 0 has that of another number of ranks (shard 0 of 2)"
        );
    }

    #[test]
    fn the_report_with_the_most_numbers_counts_and_the_lowest_holder_gives() {
        let mesh = ddp(4);
        let mut reports = reports(&mesh, "- 1:5 1:5 1:4>1:5");
        let line = |step, val_loss| MetricsLine {
            step,
            val_loss,
            ..MetricsLine::default()
        };
        reports[1].as_mut().unwrap().line = Some(line(5, None));
        reports[2].as_mut().unwrap().line = Some(line(5, Some(1.5)));
        reports[3].as_mut().unwrap().line = Some(line(4, Some(1.25)));
        let Decision::GoOn(go_on) = decide(&reports, &mesh, &[GRADIENTS.to_vec()], None, 2) else {
            panic!("rank 1 has all of it");
        };
        assert_eq!(Some(&go_on.state), reports[2].as_ref());
        assert_eq!(go_on.source(&[0, 1, 2, 3]), Some(1));
        let text = serde_json::to_string(&Decision::GoOn(go_on.clone())).unwrap();
        assert_eq!(
            serde_json::from_str::<Decision>(&text).unwrap(),
            Decision::GoOn(go_on)
        );
    }
}
