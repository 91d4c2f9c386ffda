//! ZeRO-1 and -2: the next step begins while the parameters of the last one are gathered.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use ddp_worker::collective::{Request, Traffic};
use ddp_worker::config::Strategy;
use ddp_worker::mesh::MeshShape;
use ddp_worker::model;
use ddp_worker::ops::Op;
use ddp_worker::parallel::{GradientLayout, LayoutConfig, Sharding};

use super::log::{Log, Mark};
use super::{RANKS, STEPS, job, watched};
use crate::train_support::assert_same;
use crate::train_support::watched::Watch;

/// Holds the last gather of an update until the next step's forward has begun.
#[derive(Default)]
struct NextForward {
    log: Log,
    /// Name of the unit that is gathered last.
    last: String,
    /// Gathers of it.
    held: Mutex<usize>,
    forwards: Mutex<usize>,
    /// Forwards begun when such a gather ended.
    ended: Mutex<Vec<usize>>,
}

impl Watch for NextForward {
    fn computes(&self, op: &Op) {
        if matches!(op, Op::EncoderForward(_)) {
            let mut forwards = self.forwards.lock().unwrap();
            self.log.push(Mark::Embedding(*forwards));
            *forwards += 1;
        }
    }

    fn began(&self, request: &Request) {
        if request.traffic != Traffic::Params || request.tag != format!("parameters of {}", self.last) {
            return;
        }
        let mut held = self.held.lock().unwrap();
        let next = *held;
        *held += 1;
        drop(held);
        // Before the first step nothing is under way, and behind the last one comes the validation.
        if (1..STEPS).contains(&next) {
            let what = format!("the forward of step {next}, while the last parameters are gathered");
            self.log.wait(
                &what,
                |mark| matches!(mark, Mark::Embedding(step) if *step == next),
            );
        }
    }

    fn ended(&self, request: &Request, _since: Instant) {
        if request.traffic == Traffic::Params && request.tag.ends_with(&self.last) {
            self.ended.lock().unwrap().push(*self.forwards.lock().unwrap());
        }
    }
}

#[test]
fn zero1_and_zero2_begin_the_next_forward_before_all_parameters_are_gathered() {
    let reference = job(Strategy::Ddp, |_| ()).train(RANKS);
    for strategy in [Strategy::Zero1, Strategy::Zero2] {
        let job = job(strategy, |_| ());
        let model = model::build(&job.config.model, 256).unwrap();
        let config = LayoutConfig::of(&job.config.parallel, RANKS as usize);
        let layout = GradientLayout::of_model(&model, &config).unwrap();
        let mesh = MeshShape::of_shards(RANKS as usize);
        let sharding = match strategy {
            Strategy::Zero1 => Sharding::of_buckets(&layout, mesh, 0),
            _ => Sharding::of_parts(&layout, mesh, 0),
        };
        // Backward finishes it first, so the forward needs it last.
        let last = &sharding.units()[0].name;
        let watch = || NextForward {
            last: last.clone(),
            ..NextForward::default()
        };
        let watches = [(); RANKS as usize].map(|()| Arc::new(watch()));
        let trained = watched(job, &watches);
        for watch in &watches {
            watch.log.assert_none_missed();
            // The gather after step s ends within forward s + 1, where it is held.
            let ended = watch.ended.lock().unwrap();
            assert_eq!(ended[1..STEPS], [2, 3], "{strategy:?}");
        }
        assert_same(&reference, &trained, &format!("{strategy:?}"));
    }
}
