//! The rules of the optimizers against their formulas in f64.

use std::sync::Arc;

use ddp_worker::device::DType;
use ddp_worker::ops::{Rates, Runs, Update, UpdateRule};
use ddp_worker::optim::{adamw, lion, sgd};

use super::rig::{Rig, assert_close, numbers_f32, values};

const LR: f64 = 1e-2;
const DECAY: f64 = 0.1;
const SCALE: f64 = 0.5;

/// A parameter, and an optimizer's numbers of it, after a gradient. The step counts from 1.
type Formula = fn(p: &mut f64, state: &mut [f64; 2], g: f64, step: i32);

fn follows(rule: &Arc<UpdateRule>, formula: Formula) {
    let rig = Rig::new();
    let n = 70_001;
    let start = numbers_f32(1, n);
    let grads = [2, 3, 4].map(|seed| numbers_f32(seed, n));
    let param = rig.buffer(&start);
    let slots: Vec<_> = rule.slots.iter().map(|_| rig.empty(DType::F32, n)).collect();
    for (step, grad) in (1..).zip(&grads) {
        rig.run(Update {
            rule: rule.clone(),
            runs: Runs::uniform(n, Rates::new(LR as f32, DECAY as f32)),
            param: param.clone(),
            copy: None,
            grad: rig.buffer(grad),
            slots: slots.clone(),
            scale: rig.buffer(&[SCALE as f32]),
            step,
        });
    }
    let (found, slots) = (
        values::<f32>(&param),
        slots.iter().map(values::<f32>).collect::<Vec<_>>(),
    );
    for i in [0, 1, 65_535, 65_536, n - 1] {
        let (mut p, mut state) = (f64::from(start[i]), [0.0; 2]);
        for (step, grad) in (1..).zip(&grads) {
            formula(&mut p, &mut state, SCALE * f64::from(grad[i]), step);
        }
        let what = format!("{}, element {i}", rule.name);
        assert_close(f64::from(found[i]), p, 1e-5, &what);
        for (slot, expected) in slots.iter().zip(state) {
            assert_close(f64::from(slot[i]), expected, 1e-5, &what);
        }
    }
}

/// Loshchilov & Hutter 2019, algorithm 2.
#[test]
fn adamw_follows_the_paper() {
    follows(&adamw([0.9, 0.999], 1e-8), |p, [m, v], g, step| {
        *m = 0.9 * *m + 0.1 * g;
        *v = 0.999 * *v + 0.001 * g * g;
        let (m, v) = (*m / (1.0 - 0.9_f64.powi(step)), *v / (1.0 - 0.999_f64.powi(step)));
        *p -= LR * (m / (v.sqrt() + 1e-8) + DECAY * *p);
    });
}

/// Chen et al. 2023, algorithm 2.
#[test]
fn lion_follows_the_paper() {
    follows(&lion([0.9, 0.99]), |p, [m, _], g, _| {
        let update = (0.9 * *m + 0.1 * g).signum();
        *p -= LR * (update + DECAY * *p);
        *m = 0.99 * *m + 0.01 * g;
    });
}

/// A mean of exactly zero moves nothing, as `torch.sign`.
#[test]
fn lion_has_no_sign_where_there_is_no_gradient() {
    let rig = Rig::new();
    let [param, m] = [1.0_f32, 0.0].map(|value| rig.buffer(&[value]));
    rig.run(Update {
        rule: lion([0.9, 0.99]),
        runs: Runs::uniform(1, Rates::new(0.5, 0.0)),
        param: param.clone(),
        copy: None,
        grad: rig.buffer(&[0.0_f32]),
        slots: vec![m],
        scale: rig.buffer(&[1.0_f32]),
        step: 1,
    });
    assert_eq!(values::<f32>(&param), [1.0]);
}

/// The algorithm in the documentation of `torch.optim.SGD`, with dampening 0.
#[test]
fn sgd_follows_pytorch() {
    follows(&sgd(0.0, false), |p, _, g, _| *p -= LR * (g + DECAY * *p));
    follows(&sgd(0.9, false), |p, [b, _], g, step| {
        let g = g + DECAY * *p;
        *b = if step == 1 { g } else { 0.9 * *b + g };
        *p -= LR * *b;
    });
    follows(&sgd(0.9, true), |p, [b, _], g, step| {
        let g = g + DECAY * *p;
        *b = if step == 1 { g } else { 0.9 * *b + g };
        *p -= LR * (g + 0.9 * *b);
    });
}
