//! What an agent keeps of what was said, for a stream that is opened again and for a daemon that has lost its state.

use std::time::Duration;

use ddp_proto::ids::Generation;
use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::daemon_message::Body as Word;
use ddp_proto::rendezvous::{Assignment, DaemonMessage, GenerationOver, Heartbeat, Join, Place};
use tokio::time::Instant;

/// What the agent sends again after the stream broke.
#[derive(Debug, Default)]
pub struct Memory {
    /// The agent's latest `Join`.
    join: Option<Join>,
    /// Generation last assigned.
    generation: Generation,
    /// What was reported of this generation since.
    reports: Vec<Body>,
    /// The place in the generation last assigned.
    place: Option<HeldPlace>,
    /// Highest generation of which a daemon spoke.
    latest: Generation,
    /// The agent has no workers, and takes the next assignment.
    is_joining: bool,
    /// The daemon does not take this node.
    is_refused: bool,
}

impl Memory {
    /// The agent reports this.
    pub fn note(&mut self, generation: Generation, body: &Body) {
        if let Body::Join(join) = body {
            self.join = Some(join.clone());
        }
        if generation < self.generation {
            // The agent has not read the assignment yet.
            return;
        }
        match body {
            Body::Join(_) => {
                self.generation = generation;
                self.reports.clear();
                self.is_joining = true;
            }
            Body::WorkerExit(_) | Body::NodeSucceeded(_) | Body::NodeStopped(_) | Body::NodeLeaving(_) => {
                if generation != self.generation {
                    self.generation = generation;
                    self.reports.clear();
                }
                self.reports.push(body.clone());
            }
            Body::Heartbeat(heartbeat) => {
                if let Some(place) = self.place.as_mut().filter(|_| generation == self.generation) {
                    place.rest.heartbeat = Some(heartbeat.clone());
                }
            }
            // Nothing follows the first; the second is repeated.
            Body::Leave(_) | Body::HungWorkers(_) => {}
        }
    }

    /// The daemon says this.
    pub fn receive(&mut self, now: Instant, message: &DaemonMessage) {
        let generation = Generation(message.generation);
        self.latest = self.latest.max(generation);
        match &message.body {
            // The agent takes an assignment: from now on it speaks of this generation.
            Some(Word::Assignment(assignment)) if self.takes(generation, &assignment.assignment_id) => {
                self.generation = generation;
                self.is_joining = false;
                self.reports.clear();
                self.place = HeldPlace::of(now, assignment);
            }
            Some(Word::GenerationOver(over)) if generation == self.generation => {
                if let Some(place) = &mut self.place {
                    // An agent that was out of reach learns of the end, but not what it has cost.
                    place.give_up((over.max_restarts > 0).then_some(over));
                }
            }
            Some(Word::JobOver(_) | Word::Refused(_)) => {
                self.is_refused = matches!(message.body, Some(Word::Refused(_)));
                if let Some(place) = &mut self.place {
                    place.give_up(None);
                }
            }
            _ => {}
        }
    }

    /// The daemon does not take this node: nothing is left to be said but good-bye.
    pub fn is_refused(&self) -> bool {
        self.is_refused
    }

    /// A daemon that lost its state may assign a number again. While workers run, the agent speaks of theirs.
    fn takes(&self, generation: Generation, assignment_id: &str) -> bool {
        let is_another = assignment_id != self.assignment_id(generation);
        generation > self.generation || generation == self.generation && self.is_joining && is_another
    }

    /// Which assignment of the generation it was; empty if that is not known any more.
    pub fn assignment_id(&self, generation: Generation) -> &str {
        let place = self.place.as_ref().filter(|_| generation == self.generation);
        place.map_or("", |place| &place.assignment.assignment_id)
    }

    /// What a new stream begins with: `Join`, then the reports of the generation of which they speak; nothing before
    /// the agent has joined.
    pub fn greeting(&self, now: Instant) -> (Generation, Vec<Body>) {
        let join = self.join(now).map(Body::Join);
        let reports = join.is_some().then_some(&self.reports).into_iter().flatten();
        let reports = reports.cloned();
        (self.generation, join.into_iter().chain(reports).collect())
    }

    fn join(&self, now: Instant) -> Option<Join> {
        let mut join = self.join.clone()?;
        join.latest_generation = self.latest.0;
        if let Some(place) = &self.place {
            join.run_token.clone_from(&place.assignment.run_token);
            join.place = Some(Box::new(place.told(now)));
        }
        Some(join)
    }
}

/// The place of this node in the generation that was assigned to it last, for a daemon that has lost its state.
#[derive(Debug)]
struct HeldPlace {
    assignment: Assignment,
    /// The rest, in order.
    rest: Place,
    since: Instant,
}

impl HeldPlace {
    /// None if the assignment has no place for this node, which the agent refuses.
    fn of(now: Instant, assignment: &Assignment) -> Option<Self> {
        Some(Self {
            assignment: assignment.own.is_some().then(|| assignment.clone())?,
            rest: Place {
                heartbeat: Some(Heartbeat::default()),
                ..Place::default()
            },
            since: now,
        })
    }

    /// The daemon has ended the generation, if it says so at this `cost`.
    fn give_up(&mut self, cost: Option<&GenerationOver>) {
        self.rest.over = true;
        if let Some(over) = cost {
            self.assignment.restart_count = over.restart_count;
            self.assignment.best_step = over.best_step.max(self.assignment.best_step);
        }
    }

    /// As it is sent to a daemon.
    fn told(&self, now: Instant) -> Place {
        Place {
            assignment: Some(self.assignment.clone()),
            held_ms: u64::try_from(now.duration_since(self.since).as_millis()).unwrap_or(u64::MAX),
            ..self.rest.clone()
        }
    }
}

/// Where other nodes can go on without this one, its assignment says how long it may train without the daemon
/// ([`Assignment::takeover_ms`](ddp_proto::rendezvous::Assignment)). All times are of one clock, which counts the sleep of
/// the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakeoverClock {
    /// When the last `Join` was made; the assignment that follows proves that it was received.
    joined: Duration,
    /// When the last message was made that the daemon has received for certain.
    heard: Duration,
    /// None: no node could take the place of this one.
    after: Option<Duration>,
}

impl TakeoverClock {
    /// The agent makes a `Join`.
    pub fn join(&mut self, now: Duration) {
        self.joined = now;
    }

    /// The daemon says this.
    pub fn receive(&mut self, message: &DaemonMessage) {
        match &message.body {
            Some(Word::Assignment(assignment)) => {
                let after = Duration::from_millis(assignment.takeover_ms.into());
                self.after = (!after.is_zero()).then_some(after);
                self.heard = self.heard.max(self.joined);
            }
            Some(Word::Heard(heard)) => self.heard = self.heard.max(Duration::from_millis(heard.sent_ms)),
            _ => {}
        }
    }

    /// How often the daemon has to hear of this node.
    pub fn heartbeat_interval(&self) -> Option<Duration> {
        Some(self.after? / 5)
    }

    /// When the workers are asked to stop: native ones have the rest of the time to save.
    pub fn stops_at(&self) -> Option<Duration> {
        Some(self.heard + self.after? * 2 / 3)
    }

    /// When no worker lives any more. The rest is a margin for clocks that differ, and for the kernel.
    pub fn ends_at(&self) -> Option<Duration> {
        Some(self.heard + self.after? * 9 / 10)
    }
}

#[cfg(test)]
mod tests {
    use ddp_proto::rendezvous::{NodeAssignment, NodeLeaving, NodeStopped, NodeSucceeded, Waiting};

    use super::*;

    fn receive(memory: &mut Memory, generation: u64, body: Word) {
        let message = DaemonMessage {
            generation,
            body: Some(body),
        };
        memory.receive(Instant::now(), &message);
    }

    fn assignment() -> Word {
        assignment_of("a1")
    }

    fn assignment_of(assignment_id: &str) -> Word {
        let own = NodeAssignment {
            hostname: "b".into(),
            first_rank: 2,
            workers: 2,
            ..NodeAssignment::default()
        };
        Word::Assignment(Assignment {
            node_rank: 1,
            own: Some(own),
            node_count: 2,
            world_size: 4,
            run_token: "run".into(),
            assignment_id: assignment_id.into(),
            ..Assignment::default()
        })
    }

    #[test]
    fn a_new_generation_forgets_the_reports_of_the_last() {
        let mut memory = Memory::default();
        memory.note(Generation(0), &Body::Join(Join::default()));
        receive(&mut memory, 1, assignment());
        memory.note(Generation(1), &Body::NodeSucceeded(NodeSucceeded {}));
        assert_eq!((memory.generation, memory.reports.len()), (Generation(1), 1));
        memory.note(Generation(1), &Body::NodeStopped(NodeStopped::default()));
        memory.note(Generation(1), &Body::Join(Join::default()));
        assert_eq!((memory.generation, memory.reports.len()), (Generation(1), 0));
        receive(&mut memory, 2, assignment());
        assert_eq!(memory.generation, Generation(2));
    }

    #[test]
    fn what_is_said_of_a_generation_names_its_assignment() {
        let mut memory = Memory::default();
        memory.note(Generation(0), &Body::Join(Join::default()));
        assert_eq!(memory.assignment_id(Generation(0)), "");
        receive(&mut memory, 1, assignment());
        memory.note(Generation(1), &Body::NodeStopped(NodeStopped::default()));
        memory.note(Generation(1), &Body::Join(Join::default()));
        assert_eq!(memory.assignment_id(Generation(1)), "a1", "also when it is over");
        let place = memory.join(Instant::now()).unwrap().place.unwrap();
        assert_eq!(place.assignment.unwrap().assignment_id, "a1");
        receive(&mut memory, 2, assignment());
        assert_eq!(
            memory.assignment_id(Generation(1)),
            "",
            "it is not of the new one"
        );
    }

    #[test]
    fn a_number_that_is_assigned_again_is_taken_when_no_workers_run() {
        let mut memory = Memory::default();
        memory.note(Generation(0), &Body::Join(Join::default()));
        receive(&mut memory, 1, assignment());
        let again = assignment_of("b1");
        receive(&mut memory, 1, again.clone());
        assert_eq!(
            memory.assignment_id(Generation(1)),
            "a1",
            "its workers are of this one"
        );
        let stopped = Body::NodeStopped(NodeStopped::default());
        memory.note(Generation(1), &stopped);
        memory.note(Generation(1), &Body::Join(Join::default()));
        receive(&mut memory, 1, again.clone());
        memory.note(Generation(1), &stopped);
        receive(&mut memory, 1, again);
        assert_eq!(
            (memory.assignment_id(Generation(1)), memory.reports.len()),
            ("b1", 1),
            "a repeated one changes nothing"
        );
    }

    #[test]
    fn a_new_stream_repeats_the_notice_to_leave() {
        let mut memory = Memory::default();
        memory.note(Generation(0), &Body::Join(Join::default()));
        receive(&mut memory, 1, assignment());
        let leaving = Body::NodeLeaving(NodeLeaving { signal: 15 });
        memory.note(Generation(1), &leaving);
        assert_eq!(memory.reports, [leaving]);
    }

    #[test]
    fn a_join_that_crossed_an_assignment_does_not_hide_it() {
        let mut memory = Memory::default();
        memory.note(Generation(0), &Body::Join(Join::default()));
        receive(&mut memory, 2, assignment());
        // The agent has not read the assignment yet.
        memory.note(Generation(1), &Body::Join(Join::default()));
        assert_eq!(memory.generation, Generation(2));
    }

    #[test]
    fn a_new_stream_begins_with_the_place_of_this_node_alone() {
        let mut memory = Memory::default();
        memory.note(Generation(0), &Body::Join(Join::default()));
        receive(&mut memory, 1, assignment());
        let heartbeat = Heartbeat {
            step: Some(7),
            ranks_divide: Some(12),
            ..Heartbeat::default()
        };
        memory.note(Generation(1), &Body::Heartbeat(heartbeat.clone()));
        let join = memory.join(Instant::now()).unwrap();
        assert_eq!((join.run_token.as_str(), join.latest_generation), ("run", 1));
        let place = join.place.unwrap();
        let told = place.assignment.unwrap();
        assert_eq!((told.node_rank, told.node_count, place.over), (1, 2, false));
        assert_eq!(told.own.unwrap().hostname, "b");
        assert_eq!(place.heartbeat, Some(heartbeat));
    }

    #[test]
    fn a_place_is_given_up_when_its_generation_is_over() {
        let mut memory = Memory::default();
        memory.note(Generation(0), &Body::Join(Join::default()));
        receive(&mut memory, 1, assignment());
        let over = GenerationOver {
            restart_count: 2,
            max_restarts: 3,
            best_step: Some(7),
            ..GenerationOver::default()
        };
        receive(&mut memory, 1, Word::GenerationOver(over));
        // Its workers are gone, and it waits for the next one.
        memory.note(Generation(1), &Body::Join(Join::default()));
        let place = memory.join(Instant::now()).unwrap().place.unwrap();
        let told = place.assignment.unwrap();
        assert_eq!(
            (place.over, told.restart_count, told.best_step),
            (true, 2, Some(7))
        );
        receive(&mut memory, 2, assignment());
        assert!(!memory.join(Instant::now()).unwrap().place.unwrap().over);
    }

    #[test]
    fn a_spare_tells_the_generation_that_it_received() {
        let mut memory = Memory::default();
        memory.note(Generation(0), &Body::Join(Join::default()));
        receive(&mut memory, 3, Word::Waiting(Waiting::default()));
        let join = memory.join(Instant::now()).unwrap();
        assert_eq!(
            (memory.generation, join.latest_generation, join.place),
            (Generation(0), 3, None)
        );
    }
}
