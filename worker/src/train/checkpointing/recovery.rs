//! Where a run goes on when a generation begins: at the state that its ranks still have in memory, or at the latest
//! checkpoint.
//!
//! A rank updates parameters in step `t` only behind a barrier that follows the last reduction of the step. So if one rank
//! has updated, each of the others has either updated too, or has its sums and the norm, and can finish the step alone. Every
//! rank reports what it holds ([`Held`]), and [`decide`] is a pure function of all reports: whoever calls it decides the same.
//!
//! The newest [`Version`] counts. Ranks that hold it keep it, and give it to those that do not: in each state group, the
//! lowest holder among the copies. If a shard has no holder, all ranks read the checkpoint.

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
    GoOn(GoOn),
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

/// Decides from the reports of all ranks of `mesh`, in their order. `groups` are the axes of each
/// [`crate::parallel::StateGroup`], and `latest` is the step of the latest checkpoint.
pub fn decide(
    reports: &[Option<Held>],
    mesh: &MeshShape,
    groups: &[Vec<Axis>],
    latest: Option<u64>,
) -> Decision {
    let reload = |reason| Decision::Reload { reason };
    let held = || reports.iter().flatten();
    let Some(newest) = held().map(|held| held.version).max() else {
        return reload(None);
    };
    let step = newest.step;
    if let Some(saved) = latest.filter(|saved| *saved > step) {
        return reload(Some(format!(
            "the latest checkpoint is of step {saved}, the newest state in memory of step {step}"
        )));
    }
    let is_holder = |(rank, held): (usize, &Option<Held>)| {
        (held.as_ref()).is_some_and(|held| held.reaches(newest) && held.place == Place::of(mesh, rank))
    };
    let holders: Vec<bool> = reports.iter().enumerate().map(is_holder).collect();
    for rank in (0..holders.len()).filter(|&rank| !holders[rank]) {
        for axes in groups {
            let copies = mesh.members(rank, &mesh.copied_along(axes));
            if !copies.iter().any(|&copy| holders[copy]) {
                return reload(Some(lost(reports, newest, &copies, &Place::of(mesh, rank))));
            }
        }
    }
    let knows = |held: &&Held| (held.line.as_ref()).map_or(0, |line| 1 + u8::from(line.val_loss.is_some()));
    let at_newest = held().filter(|held| held.version == newest);
    let Some(state) = at_newest.rev().max_by_key(knows) else {
        return reload(None);
    };
    Decision::GoOn(GoOn {
        state: state.clone(),
        holders,
    })
}

/// Which part of the newest state no rank holds, in words. It belongs on the ranks `copies`.
fn lost(reports: &[Option<Held>], newest: Version, copies: &[usize], part: &Place) -> String {
    let lost = format!(
        "after step {}, no rank has the state of {} in memory ({part})",
        newest.step,
        numbered("rank", copies)
    );
    let elsewhere = reports.iter().enumerate().find_map(|(rank, held)| {
        let held = (held.as_ref()).filter(|held| held.reaches(newest) && !held.place.fits(part))?;
        let place = &held.place;
        Some(format!("; rank {rank} has that of another number of ranks ({place})"))
    });
    lost + &elsewhere.unwrap_or_default()
}
