//! Deadlines by time: the next one is known without a look at all of them.
//!
//! A deadline that moves away is not written down: so a heartbeat, which renews a lease, costs nothing here. An entry may
//! be early, never late, and is brought up to date when its time has come.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

/// The deadline of each name.
#[derive(Debug, Default)]
pub(in crate::rendezvous) struct Deadlines {
    by_time: BTreeSet<(Duration, String)>,
    noted: HashMap<String, Duration>,
}

impl Deadlines {
    /// The name has this deadline now, or none.
    pub(in crate::rendezvous) fn note(&mut self, name: &str, until: Option<Duration>) {
        match (self.noted.get_mut(name), until) {
            (Some(noted), Some(until)) if until >= *noted => {}
            (Some(noted), Some(until)) => {
                let mut entry = (*noted, name.to_owned());
                self.by_time.remove(&entry);
                (entry.0, *noted) = (until, until);
                self.by_time.insert(entry);
            }
            (Some(noted), None) => {
                self.by_time.remove(&(*noted, name.to_owned()));
                self.noted.remove(name);
            }
            (None, Some(until)) => {
                self.noted.insert(name.to_owned(), until);
                self.by_time.insert((until, name.to_owned()));
            }
            (None, None) => {}
        }
    }

    /// No deadline is before; it may be early, never late.
    pub(in crate::rendezvous) fn next(&self) -> Option<Duration> {
        self.by_time.first().map(|(until, _)| *until)
    }

    /// Names whose deadlines have passed, in order: they have none from now on, until one is noted. `deadline_of` is the
    /// true one of a name, if it has one still. Entries within `slack` are brought up to date on the way, so that the timer does not fire for each of them.
    pub(in crate::rendezvous) fn expired(
        &mut self,
        now: Duration,
        slack: Duration,
        deadline_of: impl Fn(&str) -> Option<Duration>,
    ) -> Vec<String> {
        let mut expired = Vec::new();
        if self.next().is_none_or(|next| next > now) {
            return expired;
        }
        let after = now.saturating_add(slack).saturating_add(Duration::from_nanos(1));
        let later = self.by_time.split_off(&(after, String::new()));
        for (_, name) in std::mem::replace(&mut self.by_time, later) {
            match deadline_of(&name) {
                Some(until) if until > now => {
                    self.noted.insert(name.clone(), until);
                    self.by_time.insert((until, name));
                }
                due => {
                    self.noted.remove(&name);
                    expired.extend(due.map(|_| name));
                }
            }
        }
        expired.sort_unstable();
        expired
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_deadline_that_moves_is_met_where_it_is() {
        let mut deadlines = Deadlines::default();
        deadlines.note("a", Some(5 * SECOND));
        deadlines.note("a", Some(9 * SECOND));
        assert_eq!(deadlines.next(), Some(5 * SECOND), "early, but not late");
        assert_eq!(
            deadlines.expired(5 * SECOND, Duration::ZERO, |_| Some(9 * SECOND)),
            [""; 0]
        );
        assert_eq!(deadlines.next(), Some(9 * SECOND));
        deadlines.note("a", Some(SECOND));
        assert_eq!(deadlines.next(), Some(SECOND), "nearer at once");
        assert_eq!(deadlines.expired(SECOND, SECOND, |_| Some(SECOND)), ["a"]);
        assert_eq!(deadlines.next(), None, "it has passed");
        deadlines.note("a", Some(SECOND));
        deadlines.note("a", None);
        assert_eq!(deadlines.next(), None);
    }

    /// Leases of a thousand nodes that are renewed in turn are looked at a few times a lease, not at each heartbeat.
    #[test]
    fn renewed_leases_are_looked_at_together() {
        const NODES: u64 = 1000;
        let lease = 9 * SECOND;
        let mut deadlines = Deadlines::default();
        let beat = |node: u64, now: Duration| {
            // The last beat at or before now, every 3 s at the node's own moment.
            let offset = Duration::from_millis(3 * node);
            let beats = now.saturating_sub(offset).as_secs() / 3;
            offset + Duration::from_secs(3 * beats) + lease
        };
        for node in 0..NODES {
            deadlines.note(&node.to_string(), Some(beat(node, Duration::ZERO)));
        }
        let (mut ticks, mut now) = (0, Duration::ZERO);
        while now < Duration::from_mins(1) {
            now = deadlines.next().unwrap().max(now);
            ticks += 1;
            let expired = deadlines.expired(now, lease / 8, |node| Some(beat(node.parse().unwrap(), now)));
            assert_eq!(expired, [""; 0]);
        }
        assert!(ticks < 100, "{ticks} ticks");
    }
}
