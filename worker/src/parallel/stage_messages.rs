//! What the ranks of a pipeline hand to each other: activations and their gradients.
//!
//! Messages to later ranks of the pipeline go through one communicator, and those to earlier ranks through another, each
//! with a thread or a stream of its own. All ranks launch their messages in one order
//! ([`with_transfers`](super::pipeline::with_transfers)), so none waits in a circle with others.
//!
//! A receive takes memory from where it stands in a rank's row. What is sent stays until it is gone, and no longer than
//! until [`HELD`] later messages of its edge. Both follow from the row, whatever the time of the others, so that the
//! memory that activations take can be known beforehand.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use super::comm_times::CommTracker;
use super::pipeline::{Action, ActionKind, Edge, Placement, Transfer};
use crate::collective::{Communicator, Launch, Traffic, Work, WorkError};
use crate::device::{ArenaSpec, Compute, DType, DeviceError};
use crate::mesh::{Axis, Mesh};
use crate::model::{Activation, ActivationPool};

/// Messages of an edge that a rank keeps until they are sent; before one more it waits for the oldest.
const HELD: usize = 2;

/// The messages of one rank.
pub struct StageMessages {
    compute: Compute,
    placement: Placement,
    /// This rank along the pipeline.
    rank: usize,
    shape: MessageShape,
    /// To later ranks and to earlier ones; `None` without a pipeline.
    comms: Option<[Communicator; 2]>,
    /// What may not be sent yet, the oldest first.
    held: BTreeMap<Edge, VecDeque<(Work, Activation)>>,
    tracker: CommTracker,
}

/// Shape and type of every message.
#[derive(Clone, Debug)]
pub struct MessageShape {
    /// Positions, or samples and positions, then the width.
    pub dimensions: Vec<usize>,
    /// Of its elements.
    pub dtype: DType,
}

/// An activation that is received or on its way.
pub struct Arrival {
    activation: Activation,
    work: Option<Work>,
}

impl Arrival {
    /// An activation that this rank made.
    pub fn local(activation: Activation) -> Self {
        Self {
            activation,
            work: None,
        }
    }
}

/// The ranks of which the first sends to the second, in order.
fn links(placement: &Placement) -> BTreeSet<[usize; 2]> {
    let ranks = |stage| [placement.rank_of(stage - 1), placement.rank_of(stage)];
    let both = (1..placement.stages())
        .map(ranks)
        .flat_map(|[a, b]| [[a, b], [b, a]]);
    both.filter(|[from, to]| from != to).collect()
}

fn noun(edge: Edge) -> &'static str {
    if edge.is_gradient {
        "gradients"
    } else {
        "activations"
    }
}

/// What is sent, for errors: both ends say the same.
fn tag(transfer: &Transfer) -> String {
    let Transfer { send, receive, .. } = transfer;
    let what = match send.kind {
        ActionKind::SendGradient => "gradient",
        _ => "activations",
    };
    let micro_batch = send.micro_batch;
    format!(
        "`{receive}`: {what} of micro-batch {micro_batch} from stage {} for stage {}",
        send.stage, receive.stage
    )
}

impl StageMessages {
    /// Connects the stages of `placement`, each link by one element: NCCL connects to a rank in the first call for it, which
    /// returns only when that rank has made such a call too. Every rank of the mesh must call it, with no operation of the
    /// world in flight.
    pub fn connect(
        mesh: &Mesh,
        compute: &Compute,
        placement: &Placement,
        shape: MessageShape,
    ) -> Result<Self, WorkError> {
        let mut messages = Self {
            tracker: CommTracker::new(&compute.device, mesh.timeline()),
            compute: compute.clone(),
            placement: placement.clone(),
            rank: mesh.index(&[Axis::Pipeline]),
            shape,
            comms: None,
            held: BTreeMap::new(),
        };
        if placement.ranks() > 1 {
            let line = |name| mesh.line(Axis::Pipeline, name);
            messages.comms = Some([
                line("messages to later ranks")?,
                line("messages to earlier ranks")?,
            ]);
            messages.exchange_elements()?;
        }
        Ok(messages)
    }

    fn exchange_elements(&self) -> Result<(), WorkError> {
        let links = links(&self.placement);
        let spec = ArenaSpec::private("links between stages", DType::U8, links.len());
        let elements = self.compute.device.alloc(&spec).map_err(WorkError::Pending)?;
        let mut works = Vec::new();
        for (index, [from, to]) in links.into_iter().enumerate() {
            let (comm, element) = (self.comm(from, to), elements.slice(index..index + 1));
            let tag = format!("link {from} to {to}");
            let launch = Launch::after(self.compute.record(), Traffic::Other, tag);
            if from == self.rank {
                works.push(comm.send(&element, to, launch));
            } else if to == self.rank {
                works.push(comm.recv(&element, from, launch));
            }
        }
        let deadline = self.deadline();
        works.iter().try_for_each(|work| work.wait(deadline).map(drop))
    }

    /// The communicator of messages between two ranks of the pipeline.
    fn comm(&self, from: usize, to: usize) -> &Communicator {
        let comms = self.comms.as_ref().expect("there is a pipeline");
        &comms[usize::from(from > to)]
    }

    /// This rank along the pipeline.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Before the first action of a row. Drops what a row that ended with an error has left: its communicators are abandoned.
    pub fn begin(&mut self) {
        self.held.clear();
    }

    /// Begins to receive a message.
    pub fn receive(&mut self, receive: Action, pool: &ActivationPool) -> Result<Arrival, DeviceError> {
        let transfer = self.transfer(receive);
        let edge = transfer.edge();
        let activation = pool.lease(noun(edge), self.shape.dtype, &self.shape.dimensions)?;
        let launch = Launch::after(self.compute.record(), Traffic::Pipeline, tag(&transfer));
        let comm = self.comm(edge.from, edge.to);
        let work = self
            .tracker
            .launch(|| comm.recv(activation.buffer(), edge.from, launch));
        Ok(Arrival {
            activation,
            work: Some(work),
        })
    }

    /// Lets the stream that computes wait for an activation.
    pub fn arrived(&self, arrival: Arrival) -> Result<Activation, DeviceError> {
        if let Some(work) = arrival.work {
            self.await_in_stream(&work)?;
        }
        Ok(arrival.activation)
    }

    /// Sends an activation once the stream that computes has made it, and keeps it until then.
    pub fn send(&mut self, send: Action, activation: Activation) -> Result<(), DeviceError> {
        let transfer = self.transfer(send);
        let edge = transfer.edge();
        if self.held.get(&edge).is_some_and(|held| held.len() == HELD) {
            self.let_go(edge)?;
        }
        let launch = Launch::after(self.compute.record(), Traffic::Pipeline, tag(&transfer));
        let comm = self.comm(edge.from, edge.to);
        let work = self
            .tracker
            .launch(|| comm.send(activation.buffer(), edge.to, launch));
        self.held.entry(edge).or_default().push_back((work, activation));
        self.tracker.check_input()
    }

    /// Ends a row after its last action: releases all activations once they are sent.
    pub fn finish(&mut self) -> Result<(), DeviceError> {
        let edges: Vec<Edge> = self.held.keys().copied().collect();
        for edge in edges {
            while !self.held[&edge].is_empty() {
                self.let_go(edge)?;
            }
        }
        Ok(())
    }

    /// Times and failure of the messages. A message's time begins when its receive is launched.
    pub fn tracker(&self) -> &CommTracker {
        &self.tracker
    }

    /// Releases the oldest activation of an edge once it is sent.
    fn let_go(&mut self, edge: Edge) -> Result<(), DeviceError> {
        let oldest = self.held.get_mut(&edge).and_then(VecDeque::pop_front);
        oldest.map_or(Ok(()), |(work, _activation)| self.await_in_stream(&work))
    }

    fn await_in_stream(&self, work: &Work) -> Result<(), DeviceError> {
        self.tracker
            .wait_in_stream(self.compute.stream, work.event(), self.deadline());
        self.tracker.check_input()
    }

    /// When to stop waiting for a message; both communicators have one time-out.
    fn deadline(&self) -> Instant {
        self.comm(0, 1).deadline()
    }

    fn transfer(&self, action: Action) -> Transfer {
        let transfer = action.transfer(&self.placement);
        transfer.expect("the schedule was checked: another rank is at the other end")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_goes_from_every_stage_to_the_next_and_back() {
        let linked = |placement: &Placement| Vec::from_iter(links(placement));
        assert_eq!(linked(&Placement::looped(3, 1)), [[0, 1], [1, 0], [1, 2], [2, 1]]);
        assert_eq!(linked(&Placement::looped(3, 2)).len(), 6);
        // Between the chunks of the last rank nothing is sent.
        assert_eq!(linked(&Placement::v_shaped(2, 2)), [[0, 1], [1, 0]]);
        assert_eq!(linked(&Placement::looped(1, 1)), [[0; 2]; 0]);
    }

    #[test]
    fn a_message_says_stage_action_and_micro_batch() {
        let placement = Placement::looped(2, 1);
        let receive = Action {
            rank: 0,
            stage: 0,
            kind: ActionKind::ReceiveGradient,
            micro_batch: 3,
        };
        let transfer = receive.transfer(&placement).unwrap();
        assert_eq!(
            tag(&transfer),
            "`0RECV_B3`: gradient of micro-batch 3 from stage 1 for stage 0"
        );
    }
}
