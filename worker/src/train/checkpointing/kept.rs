//! What a rank keeps in memory of a generation that ended in the middle: the state itself, where it is, and what finishes
//! the step that was broken off. In the next generation all ranks decide where they go on ([`recover`]), and those that
//! lack state get it from those that hold copies of it ([`exchange`]).

use std::sync::Arc;

use super::buddy::BuddyCopy;
use super::owned_state::RankState;
use super::recovery::{Decision, GoOn, Held, Version, decide};
use crate::collective::{Failure, Launch, StoreExchange, Traffic, Wait};
use crate::device::{Compute, DeviceError, StateMemory};
use crate::ops::Cast;
use crate::optim::{Clip, Optimizer, UpdateStep};
use crate::parallel::{AgreementError, ArenaShare, Parameters, Sharding, group_axes};
use crate::session::Session;
use crate::train::TrainError;
use crate::train::rank_spec::RankSpec;
use crate::train::reporting::say;
use crate::train::world::{is_restarted, timeout};

/// A step of which this rank has the norm and all sums, its copy's too: only the update is missing.
pub(crate) struct UnfinishedStep {
    /// Where it leads to.
    pub(crate) version: Version,
    pub(crate) grads: ArenaShare,
    pub(crate) update: UpdateStep,
}

/// What a rank keeps when its generation breaks off. No thread of that generation uses the memory any more.
pub(crate) struct Kept {
    pub(crate) compute: Compute,
    /// What the rank owns of the parameters.
    pub(crate) own: ArenaShare,
    pub(crate) sharding: Arc<Sharding>,
    pub(crate) optimizer: Optimizer,
    pub(crate) copy: Option<BuddyCopy>,
    /// It has measured the norm of the step.
    pub(crate) clip: Clip,
    pub(crate) unfinished: Option<UnfinishedStep>,
    pub(crate) held: Held,
}

impl Kept {
    /// Finishes the step that was broken off, if that leads to `newest`. Nothing is needed of other ranks: the step has
    /// an update only if the numbers of all of them are finite.
    fn advance(&mut self, newest: &Held) -> Result<(), DeviceError> {
        let unfinished = self.unfinished.take();
        let is_behind = self.held.version != newest.version;
        if let Some(step) = unfinished.filter(|_| is_behind && newest.updates > self.held.updates) {
            let home = self.optimizer.home();
            self.clip.finish(None);
            // It has no exchanges with other ranks.
            let _ = (self.optimizer).step(self.compute.stream, &self.own, &step.grads, &step.update);
            if let Some(copy) = &self.copy {
                copy.step(self.compute.stream, &step.update);
            }
            home.synchronize(self.compute.stream)?;
        }
        self.held = Held {
            place: self.held.place.clone(),
            copy_of: self.held.copy_of.clone(),
            unfinished: None,
            ..newest.clone()
        };
        Ok(())
    }

    /// True if the rank owns the same elements at the same places.
    fn fits(&self, sharding: &Sharding) -> bool {
        let layout = |sharding: &Sharding| {
            let sizes = [sharding.whole_len(), sharding.shard_len()];
            (sizes, sharding.own_pieces())
        };
        layout(&self.sharding) == layout(sharding)
    }

    /// What the rank owns of the parameters, if that is what it is to own in the next generation.
    pub(crate) fn own(&self, spec: &RankSpec) -> Option<ArenaShare> {
        let sharding = spec.strategy.sharding(&spec.layout, spec.rank);
        self.fits(&sharding).then(|| self.own.clone())
    }

    /// The optimizer of the next generation, and `parameters`, with the state. It moves, unless memory that ranks share or
    /// another layout makes it a copy.
    pub(crate) fn settle(
        self,
        spec: &RankSpec,
        parameters: &Parameters,
        home: &Arc<StateMemory>,
    ) -> Result<Optimizer, TrainError> {
        let (own, stream) = (parameters.own(), self.compute.stream);
        let copy = |from: &ArenaShare, to: &ArenaShare| {
            let pieces = |sharding: &Sharding| {
                let mut pieces = sharding.own_pieces();
                pieces.sort_by_key(|piece| piece.param);
                pieces
            };
            let pairs = pieces(&self.sharding)
                .into_iter()
                .zip(pieces(parameters.sharding()));
            let casts = pairs.map(|(from_piece, to_piece)| {
                let (x, out) = (from.slice(&from_piece.place), to.slice(&to_piece.place));
                Cast { x, out }.into()
            });
            home.enqueue_all(stream, casts.collect());
        };
        let optimizer = if self.fits(parameters.sharding()) {
            // Masters are rounded into the parameters later.
            let has_masters = !std::ptr::eq(self.optimizer.masters(own), own);
            if !has_masters && !own.arena().same(self.own.arena()) {
                copy(&self.own, own);
            }
            self.optimizer
        } else {
            let renewed = spec.optimizer(parameters, home)?;
            copy(self.optimizer.masters(&self.own), renewed.masters(own));
            let slots = self.optimizer.slots().zip(renewed.slots());
            slots.for_each(|((_, from), (_, to))| copy(from, to));
            renewed
        };
        home.synchronize(stream)?;
        Ok(optimizer)
    }
}

/// Decides with all ranks where the run goes on: at the state in memory, or (`None`) at the checkpoint after `latest` steps
/// or at its beginning. What this rank has `kept` is then at that state, or gone.
pub(crate) fn recover(
    session: &Session,
    spec: &RankSpec,
    kept: &mut Option<Kept>,
    latest: Option<u64>,
) -> Result<Option<Box<GoOn>>, TrainError> {
    let (env, store) = (session.env(), session.store());
    if !is_restarted(env) {
        return Ok(None);
    }
    // A GPU may have no room for both layouts at once.
    let moved = kept.take_if(|kept| kept.compute.device.is_asynchronous() && kept.own(spec).is_none());
    if let Some(kept) = kept {
        // Other nodes may have changed who keeps whose copy.
        let buddies = spec.strategy.mesh.buddies(spec.rank);
        kept.copy.take_if(|copy| copy.buddies != buddies);
        kept.held.copy_of.take_if(|_| kept.copy.is_none());
    }
    let exchange = StoreExchange {
        store: store.as_ref(),
        wait: &Wait::new(timeout(&spec.config), &session.cancel()),
        what: "exchanging what ranks have in memory",
        prefix: "state".to_owned(),
        rank: env.rank.get() as usize,
        ranks: env.world_size.get() as usize,
    };
    let unreadable = |e: serde_json::Error| Failure::Invalid(format!("a report of kept state: {e}"));
    let own = serde_json::to_vec(&kept.as_ref().map(|kept| &kept.held)).map_err(unreadable);
    let decided = own.and_then(|own| {
        exchange.decide(&own, |reports| {
            let reports = reports.iter().map(|report| serde_json::from_slice(report));
            let reports: Vec<Option<Held>> = reports.collect::<Result<_, _>>().map_err(unreadable)?;
            let groups = group_axes(&spec.model.all_params);
            let decision = decide(
                &reports,
                &spec.strategy.mesh,
                &groups,
                latest,
                env.generation.get(),
            );
            serde_json::to_vec(&decision).map_err(unreadable)
        })
    });
    let decision = decided.and_then(
        |bytes| match serde_json::from_slice(&bytes).map_err(unreadable)? {
            Decision::GoOn(go_on) if go_on.holders.len() != exchange.ranks => {
                let words = format!("{} holders of kept state", go_on.holders.len());
                Err(Failure::Invalid(words))
            }
            decision => Ok(decision),
        },
    );
    match decision.map_err(AgreementError::from)? {
        Decision::GoOn(go_on) => {
            kept.take_if(|_| !go_on.holders[exchange.rank]);
            if let Some(kept) = kept {
                kept.advance(&go_on.state)?;
            }
            Ok(Some(go_on))
        }
        Decision::Reload { reason } => {
            *kept = None;
            let moved = moved.map(|_| "GPUs keep no state when the number of ranks changes".to_owned());
            if let (0, Some(reason)) = (exchange.rank, reason.or(moved)) {
                let from = latest.map_or("the beginning".into(), |step| {
                    format!("the checkpoint of step {step}")
                });
                say(&format!("the run goes on from {from}: {reason}"));
            }
            Ok(None)
        }
    }
}

/// Gives this rank's part of the state to the ranks that should hold copies of it and lack them, or takes it from one that
/// does. Every rank calls it.
pub(crate) fn exchange(here: RankState<'_>, go_on: &GoOn) -> Result<(), TrainError> {
    let parameters = &here.replica.parameters;
    let masters = here.optimizer.masters(parameters.own());
    let slots = here.optimizer.slots().map(|(_, share)| share);
    let shares: Vec<&ArenaShare> = std::iter::once(masters).chain(slots).collect();
    for (index, unit) in parameters.sharding().units().iter().enumerate() {
        let Some(copies) = &parameters.replica_set().group(&unit.axes).copies else {
            continue;
        };
        let lacks = |rank: &usize| !go_on.holders[copies.members()[*rank]];
        let source = go_on.source(copies.members());
        let source = copies.members().iter().position(|rank| Some(*rank) == source);
        let source = source.expect("each part of the state has a holder");
        for share in &shares {
            let part = share.slice(&parameters.sharding().own_ranges(index));
            let launch = || {
                let ready = here.world.compute.record();
                Launch::after(ready, Traffic::Params, format!("state of {}", unit.name))
            };
            if copies.rank() == source {
                for to in (0..copies.size()).filter(lacks) {
                    copies.send(&part, to, launch()).wait(copies.deadline())?;
                }
            } else if lacks(&copies.rank()) {
                copies.recv(&part, source, launch()).wait(copies.deadline())?;
            }
        }
    }
    Ok(())
}
