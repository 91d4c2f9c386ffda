//! Moments as text, in UTC: here because launcher and worker both write them, for the same people.

use std::time::{SystemTime, UNIX_EPOCH};

use prost_types::Timestamp;

/// Seconds since the epoch, 0 before it.
pub fn seconds_of(moment: SystemTime) -> u64 {
    moment.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// `20261120-104516-3f9a1c`: sorts by time, unique on one machine.
pub fn unique_id(now: SystemTime) -> String {
    let time = rfc_3339(seconds_of(now)).replace(['-', ':', 'Z'], "");
    let random = rand::random_range(0..1_u32 << 24);
    format!("{}-{random:06x}", time.replace('T', "-"))
}

/// Seconds since the epoch for people: `2026-11-20 10:45:16 UTC`.
pub fn written(seconds: u64) -> String {
    rfc_3339(seconds).replace('T', " ").replace('Z', " UTC")
}

/// `2026-11-20T10:45:16Z`
pub fn rfc_3339(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
    Timestamp { seconds, nanos: 0 }.to_string()
}

/// This moment.
pub fn now() -> String {
    rfc_3339(seconds_of(SystemTime::now()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_name_files_and_are_read_by_people() {
        let moment = UNIX_EPOCH + std::time::Duration::from_secs(951_868_799);
        let ids = [unique_id(moment), unique_id(moment)];
        assert!(ids.iter().all(|id| id.starts_with("20000229-235959-")), "{ids:?}");
        assert_ne!(ids[0], ids[1]);
        assert_eq!(written(1_795_171_516), "2026-11-20 10:45:16 UTC");
        assert!(written(u64::MAX).ends_with(" UTC"), "of a damaged file");
    }
}
