//! Moments as text, in UTC: here because launcher and worker both write them, for the same people.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since the epoch, 0 before it.
pub fn seconds_of(moment: SystemTime) -> u64 {
    moment.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Seconds since the epoch for the name of a file: `20261120-104516`, which sorts by time.
pub fn stamp(seconds: u64) -> String {
    let ([year, month, day], [hour, minute, second]) = parts(seconds);
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

/// `20261120-104516-3f9a1c`: sorts by time, unique on one machine.
pub fn unique_id(now: SystemTime) -> String {
    let random = rand::random_range(0..1_u32 << 24);
    format!("{}-{random:06x}", stamp(seconds_of(now)))
}

/// Seconds since the epoch for people: `2026-11-20 10:45:16 UTC`.
pub fn written(seconds: u64) -> String {
    let ([year, month, day], [hour, minute, second]) = parts(seconds);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// Year, month, day; hour, minute, second. The date follows Howard Hinnant's `civil_from_days`, which counts from
/// 1 March so that leap days come last.
fn parts(seconds: u64) -> ([u64; 3], [u64; 3]) {
    let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let time = [second_of_day / 3_600, second_of_day / 60 % 60, second_of_day % 60];
    ([year, month, day], time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leap_days_and_centuries_are_where_they_belong() {
        assert_eq!(stamp(0), "19700101-000000");
        assert_eq!(stamp(951_782_399), "20000228-235959");
        assert_eq!(stamp(951_868_799), "20000229-235959");
        assert_eq!(stamp(1_795_171_516), "20261120-104516");
        assert_eq!(stamp(4_107_542_400), "21000301-000000");
        let moment = UNIX_EPOCH + std::time::Duration::from_secs(951_868_799);
        let ids = [unique_id(moment), unique_id(moment)];
        assert!(ids.iter().all(|id| id.starts_with("20000229-235959-")));
        assert_ne!(ids[0], ids[1]);
        assert_eq!(written(1_795_171_516), "2026-11-20 10:45:16 UTC");
    }
}
