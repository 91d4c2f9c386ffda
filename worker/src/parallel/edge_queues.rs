//! What the ranks of a pipeline hand to each other: activations and their gradients, through one queue a directed edge.
//!
//! Each queue has a communicator of its own, of two ranks and with a thread or a stream of its own. With one queue for all
//! edges, two ranks could each wait for a message that is queued behind another one. Messages of an edge
//! arrive in the order in which they are sent; the validator has checked the schedule for that.
//!
//! A queue holds a number of messages, the same on both sides: so many receives are posted ahead of the one that is taken,
//! and so many activations are held until they are sent; one more first waits for the oldest. Both are leased and let go
//! at fixed places of a rank's row, whatever the time of the others, so that the memory that activations take can be known
//! beforehand.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::comm_times::CommTracker;
use super::pipeline::{Action, ActionKind, Edge, Placement, Transfer};
use crate::collective::{CollectiveError, Communicator, Launch, Traffic, Work};
use crate::device::{DType, Device, DeviceError, Stream};
use crate::mesh::{Axis, Mesh};
use crate::model::{Activation, ActivationPool};

/// The queues of one rank.
pub struct EdgeQueues {
    device: Arc<dyn Device>,
    /// The one that computes.
    stream: Stream,
    placement: Placement,
    /// This rank along the pipeline.
    rank: usize,
    /// Messages that a queue holds.
    capacity: usize,
    /// Shape of every message.
    shape: Vec<usize>,
    dtype: DType,
    outgoing: BTreeMap<Edge, Outgoing>,
    incoming: BTreeMap<Edge, Incoming>,
    tracker: CommTracker,
}

struct Outgoing {
    comm: Communicator,
    /// Messages that may not be sent yet, the oldest first.
    held: VecDeque<(Work, Activation)>,
}

struct Incoming {
    comm: Communicator,
    /// Messages that no receive is posted for yet, in order.
    expected: VecDeque<Transfer>,
    posted: VecDeque<(Transfer, Arrival)>,
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

/// The edges between stages that follow each other: each with its activations and, the other way, their gradients.
fn edges(placement: &Placement) -> Vec<Edge> {
    let stages = 1..placement.stages();
    let both = stages.flat_map(|stage| {
        let (from, to) = (placement.rank_of(stage - 1), placement.rank_of(stage));
        let activations = Edge {
            from,
            to,
            is_gradient: false,
        };
        let gradients = Edge {
            from: to,
            to: from,
            is_gradient: true,
        };
        [activations, gradients]
    });
    let mut edges: Vec<Edge> = both.filter(|edge| edge.from != edge.to).collect();
    edges.sort_unstable();
    edges.dedup();
    edges
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

impl EdgeQueues {
    /// The queues of this rank between the stages of `placement`. Messages have the given shape and type, and
    /// are received up to `ahead` actions before they are sent. Every rank of the mesh must
    /// call it, with no operation of the world in flight.
    pub fn connect(
        mesh: &Mesh,
        (device, stream): (&Arc<dyn Device>, Stream),
        (placement, capacity, ahead): (&Placement, usize, usize),
        (shape, dtype): (&[usize], DType),
    ) -> Result<Self, CollectiveError> {
        let edges = edges(placement);
        let pairs: Vec<[usize; 2]> = edges.iter().map(|edge| [edge.from, edge.to]).collect();
        let name = |pair: usize| {
            let edge: Edge = edges[pair];
            format!("{} {} to {}", noun(edge), edge.from, edge.to)
        };
        let comms = mesh.pairs(Axis::Pipeline, &pairs, name, ahead)?;
        let own = mesh.index(&[Axis::Pipeline]);
        let (mut outgoing, mut incoming) = (BTreeMap::new(), BTreeMap::new());
        for (edge, comm) in edges.iter().zip(comms) {
            let Some(comm) = comm else { continue };
            if edge.from == own {
                let held = VecDeque::new();
                outgoing.insert(*edge, Outgoing { comm, held });
            } else {
                let (expected, posted) = (VecDeque::new(), VecDeque::new());
                let queue = Incoming {
                    comm,
                    expected,
                    posted,
                };
                incoming.insert(*edge, queue);
            }
        }
        Ok(Self {
            tracker: CommTracker::new(device, mesh.timeline()),
            device: device.clone(),
            stream,
            placement: placement.clone(),
            rank: own,
            capacity,
            shape: shape.to_vec(),
            dtype,
            outgoing,
            incoming,
        })
    }

    /// This rank along the pipeline.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Before the first action of a row: posts as many receives as the queues hold.
    pub fn begin(&mut self, row: &[Action], pool: &ActivationPool) -> Result<(), DeviceError> {
        for queue in self.outgoing.values_mut() {
            queue.held.clear();
        }
        for queue in self.incoming.values_mut() {
            queue.expected.clear();
            queue.posted.clear();
        }
        for action in row.iter().filter(|action| action.kind.is_receive()) {
            let transfer = self.transfer(*action);
            let queue = self.incoming.get_mut(&transfer.edge());
            queue
                .expect("the edges of the placement")
                .expected
                .push_back(transfer);
        }
        let edges: Vec<Edge> = self.incoming.keys().copied().collect();
        for _ in 0..self.capacity {
            for edge in &edges {
                self.post(*edge, pool)?;
            }
        }
        Ok(())
    }

    /// Takes the message of a receive, and posts the next receive of its edge.
    pub fn receive(&mut self, receive: Action, pool: &ActivationPool) -> Result<Arrival, DeviceError> {
        let transfer = self.transfer(receive);
        let queue = self.incoming.get_mut(&transfer.edge()).expect("it began with it");
        let (expected, arrival) = queue.posted.pop_front().expect("a receive was posted ahead");
        assert_eq!(
            expected, transfer,
            "messages of an edge come in the order of the row"
        );
        self.post(transfer.edge(), pool)?;
        Ok(arrival)
    }

    /// Lets the stream that computes wait for an activation.
    pub fn arrived(&self, arrival: Arrival) -> Result<Activation, DeviceError> {
        if let Some(work) = arrival.work {
            self.tracker
                .wait_in_stream(self.stream, work.event(), self.deadline());
            self.tracker.check_input()?;
        }
        Ok(arrival.activation)
    }

    /// Sends an activation once the stream that computes has made it, and keeps it until then.
    pub fn send(&mut self, send: Action, activation: Activation) -> Result<(), DeviceError> {
        let transfer = self.transfer(send);
        let edge = transfer.edge();
        if self.outgoing[&edge].held.len() == self.capacity {
            self.let_go(edge)?;
        }
        let launch = Launch::after(self.device.record(self.stream), Traffic::Pipeline, tag(&transfer));
        let queue = self.outgoing.get_mut(&edge).expect("it was asked before");
        let comm = &queue.comm;
        let work = self
            .tracker
            .launch(|| comm.send(activation.buffer(), 1 - comm.rank(), launch));
        queue.held.push_back((work, activation));
        self.tracker.check_input()
    }

    /// Ends a row after its last action: releases all activations once they are sent.
    pub fn finish(&mut self) -> Result<(), DeviceError> {
        let edges: Vec<Edge> = self.outgoing.keys().copied().collect();
        for edge in edges {
            while !self.outgoing[&edge].held.is_empty() {
                self.let_go(edge)?;
            }
        }
        Ok(())
    }

    /// Times and failure of the messages. A message's time begins when its receive is posted.
    pub fn tracker(&self) -> &CommTracker {
        &self.tracker
    }

    /// Posts the next receive of an edge, if there is one.
    fn post(&mut self, edge: Edge, pool: &ActivationPool) -> Result<(), DeviceError> {
        let queue = self.incoming.get_mut(&edge).expect("an edge of this rank");
        let Some(transfer) = queue.expected.pop_front() else {
            return Ok(());
        };
        let activation = pool.lease(noun(edge), self.dtype, &self.shape)?;
        let launch = Launch::after(self.device.record(self.stream), Traffic::Pipeline, tag(&transfer));
        let comm = &queue.comm;
        let work = self
            .tracker
            .launch(|| comm.recv(activation.buffer(), 1 - comm.rank(), launch));
        let arrival = Arrival {
            activation,
            work: Some(work),
        };
        queue.posted.push_back((transfer, arrival));
        Ok(())
    }

    /// Releases the oldest activation once it is sent.
    fn let_go(&mut self, edge: Edge) -> Result<(), DeviceError> {
        let queue = self.outgoing.get_mut(&edge).expect("an edge of this rank");
        if let Some((work, activation)) = queue.held.pop_front() {
            let deadline = queue.comm.deadline();
            self.tracker.wait_in_stream(self.stream, work.event(), deadline);
            drop(activation);
        }
        self.tracker.check_input()
    }

    fn deadline(&self) -> std::time::Instant {
        let mut queues = self.incoming.values().map(|queue| &queue.comm);
        let comm = queues.next().expect("something arrives through a queue");
        comm.deadline()
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
    fn an_edge_goes_from_every_stage_to_the_next_and_back() {
        let words = |placement: &Placement| -> Vec<String> {
            let of = |edge: Edge| format!("{} {}-{}", noun(edge), edge.from, edge.to);
            edges(placement).into_iter().map(of).collect()
        };
        assert_eq!(
            words(&Placement::looped(2, 1)),
            ["activations 0-1", "gradients 1-0"]
        );
        // Between the chunks of the last rank nothing is sent.
        assert_eq!(
            words(&Placement::v_shaped(2, 2)),
            [
                "activations 0-1",
                "gradients 0-1",
                "activations 1-0",
                "gradients 1-0"
            ]
        );
        assert_eq!(words(&Placement::looped(1, 1)), [""; 0]);
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
