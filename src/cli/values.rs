//! Values of single settings: read the same way from a flag, a `PET_*` variable and a YAML key.
//!
//! Every parser is a pure function from text to value; its error says what was expected.

use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use ddp_launcher::{NodeRange, PrefixTemplate};
use ddp_proto::ids::{MAX_NODES, MAX_WORKERS};
use ddp_proto::ports::{BadPortRange, PortRange};

use super::machine::numa::Binding;

/// Port of a rendezvous endpoint that names none, as torchrun.
pub const DEFAULT_PORT: u16 = 29_400;

/// Longest time-out that is accepted, in seconds (30 days).
const MAX_TIMEOUT_S: f64 = 30.0 * 86_400.0;

/// A whole number above 0, of any of the types that hold no other.
pub fn one_or_more<N: FromStr>(text: &str) -> Result<N, String> {
    let number = text.parse();
    number.map_err(|_| "expected a whole number, 1 or more".to_owned())
}

/// The number of workers of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcCount {
    /// A number.
    Fixed(u32),
    /// `cpu`: one worker a usable core.
    Cpu,
    /// `gpu`: one worker per visible GPU; a node without GPUs is an error.
    Gpu,
    /// `auto`: as `gpu` where there is one, else as `cpu`.
    Auto,
}

/// `host[:port]` of the rendezvous daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Host name or address, IPv6 without its brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// `--rdzv-conf`, comma-separated `key=value` pairs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RdzvConf {
    /// `is_host`: whether this node hosts the daemon.
    pub is_host: Option<bool>,
    /// `join_timeout`: how long to wait for the other nodes.
    pub join_timeout: Option<Duration>,
    /// `connect_timeout`, torchrun's `timeout`: how long the daemon may be unreachable.
    pub connect_timeout: Option<Duration>,
    /// `outage_timeout`: the same while workers run.
    pub outage_timeout: Option<Duration>,
    /// `takeover_timeout`: how long a node may train without the daemon where others can take its place.
    pub takeover_timeout: Option<Duration>,
    /// `last_call_timeout`: how long to wait for more nodes once MIN are there.
    pub last_call_timeout: Option<Duration>,
    /// Other keys, which torchrun takes and its rendezvous may know: they change nothing here.
    pub ignored: Vec<String>,
}

/// Keys of [`RdzvConf`], for the message on others.
pub const RDZV_CONF_KEYS: &str = "`is_host`, `join_timeout`, `connect_timeout` (torchrun's `timeout`), `outage_timeout`, \
     `takeover_timeout`, `last_call_timeout`";

/// `--event-log-handler`: the file to which events are appended, if any. `console` is standard error, where the
/// launcher's own messages go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventLog(pub Option<PathBuf>);

/// One of torchrun's backends that this program can stand for.
pub fn backend(text: &str) -> Result<String, String> {
    match text {
        "c10d" | "static" | "grpc" | "ddp" => Ok(text.to_owned()),
        "etcd" | "etcd-v2" => Err(
            "etcd is not supported: omit the flag and give the address of one node with `--rdzv-endpoint`"
                .to_owned(),
        ),
        _ => Err("expected `c10d`, `static` or `grpc`, which all use the rendezvous of ddp-run".to_owned()),
    }
}

/// `null`, `console` or a file.
pub fn event_log(text: &str) -> Result<EventLog, String> {
    match text {
        "" => Err("expected `null`, `console` or the path of a file".to_owned()),
        "null" => Ok(EventLog(None)),
        "console" => Ok(EventLog(Some("/dev/stderr".into()))),
        path => Ok(EventLog(Some(path.into()))),
    }
}

/// `node`, `socket` or `exclusive`.
pub fn binding(text: &str) -> Result<Binding, String> {
    match text {
        "node" => Ok(Binding::Node),
        "socket" => Ok(Binding::Socket),
        "exclusive" => Ok(Binding::Exclusive),
        "core-complex" => Ok(Binding::CoreComplex),
        _ => Err("expected `node`, `socket`, `exclusive` or `core-complex`".to_owned()),
    }
}

/// A TCP port that can be served.
pub fn port(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(port @ 1..) => Ok(port),
        _ => Err("expected a port from 1 to 65535".to_owned()),
    }
}

/// `29500-29600`.
pub fn port_range(text: &str) -> Result<PortRange, String> {
    text.parse().map_err(|error: BadPortRange| error.to_string())
}

/// Name of a role.
pub fn role(text: &str) -> Result<String, String> {
    if text.is_empty() || text.len() > 128 || text.chars().any(char::is_control) {
        return Err("expected a name of 1 to 128 characters".to_owned());
    }
    Ok(text.to_owned())
}

/// A path.
pub fn path(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() {
        return Err("expected a path".to_owned());
    }
    // Some shells leave it in `--log-dir=~/logs`, and YAML always does.
    if text.starts_with('~') {
        return Err("expected a path without `~`: write the whole path".to_owned());
    }
    Ok(PathBuf::from(text))
}

/// Any text.
pub fn text(text: &str) -> Result<String, String> {
    Ok(text.to_owned())
}

/// A prefix of lines, in which everything means something.
pub fn prefix_template(text: &str) -> Result<PrefixTemplate, String> {
    Ok(PrefixTemplate::new(text))
}

/// `N` or `MIN:MAX`.
pub fn node_range(text: &str) -> Result<NodeRange, String> {
    let expected =
        || format!("expected `N` or `MIN:MAX` with 1 <= MIN <= MAX <= {MAX_NODES}, for example `2` or `1:4`");
    let count = |part: &str| match part.parse::<u32>() {
        Ok(n) if (1..=MAX_NODES).contains(&n) => Ok(n),
        _ => Err(expected()),
    };
    let (min, max) = match text.split_once(':') {
        Some((min, max)) => (count(min)?, count(max)?),
        None => (count(text)?, count(text)?),
    };
    if min > max {
        return Err(format!("MIN is {min}, but MAX is {max}: {}", expected()));
    }
    Ok(NodeRange { min, max })
}

/// A number of workers, `auto`, `cpu` or `gpu`.
pub fn proc_count(text: &str) -> Result<ProcCount, String> {
    match text {
        "auto" => Ok(ProcCount::Auto),
        "cpu" => Ok(ProcCount::Cpu),
        "gpu" => Ok(ProcCount::Gpu),
        number => match number.parse() {
            Ok(n) if (1..=MAX_WORKERS).contains(&n) => Ok(ProcCount::Fixed(n)),
            _ => Err(format!(
                "expected a whole number from 1 to {MAX_WORKERS}, `auto`, `cpu` or `gpu`"
            )),
        },
    }
}

/// `host`, `host:port`, `[ipv6]` or `[ipv6]:port`; port 0 stands for a free one.
pub fn endpoint(text: &str) -> Result<Endpoint, String> {
    const EXPECTED: &str =
        "expected `host[:port]`, an IPv6 address in brackets, for example `node0:29400` or `[fd00::1]:29400`";
    let port = |part: &str| {
        let not_a_port = |_| format!("`{part}` is not a port from 0 to 65535: {EXPECTED}");
        part.parse::<u16>().map_err(not_a_port)
    };
    let (host, port) = if let Some(rest) = text.strip_prefix('[') {
        let (host, rest) = rest.split_once(']').ok_or(EXPECTED)?;
        host.parse::<Ipv6Addr>()
            .map_err(|_| format!("`{host}` is not an IPv6 address: {EXPECTED}"))?;
        match rest.strip_prefix(':') {
            Some(rest) => (host, port(rest)?),
            None if rest.is_empty() => (host, DEFAULT_PORT),
            None => return Err(EXPECTED.to_owned()),
        }
    } else {
        match text.split_once(':') {
            Some((_, rest)) if rest.contains(':') => return Err(EXPECTED.to_owned()),
            Some((host, rest)) => (host, port(rest)?),
            None => (text, DEFAULT_PORT),
        }
    };
    let is_host_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '%');
    if host.is_empty() || !host.chars().all(is_host_char) {
        return Err(EXPECTED.to_owned());
    }
    Ok(Endpoint {
        host: host.to_owned(),
        port,
    })
}

/// The shortest time in which a node can be told from one that is gone.
const LEAST_TAKEOVER: Duration = Duration::from_secs(5);

fn takeover(text: &str) -> Result<Duration, String> {
    let time = seconds(text)?;
    if time < LEAST_TAKEOVER {
        return Err(format!("expected at least {} s", LEAST_TAKEOVER.as_secs()));
    }
    Ok(time)
}

/// Comma-separated `key=value` pairs, quoted or not; a key that is given more than once is refused, an unknown one is kept
/// apart.
pub fn rdzv_conf(text: &str) -> Result<RdzvConf, String> {
    let mut conf = RdzvConf::default();
    let pairs = unquoted(text).split(',').map(str::trim);
    for pair in pairs.filter(|pair| !pair.is_empty()) {
        let (key, value) = pair
            .split_once('=')
            .ok_or_else(|| format!("`{pair}` is not of the form `key=value`"))?;
        let (key, value) = (key.trim(), unquoted(value));
        let in_key = |message: String| format!("`{key}={value}`: {message}");
        let time = || seconds(value).map_err(in_key);
        let twice = match key {
            "is_host" => conf.is_host.replace(boolean(value).map_err(in_key)?).is_some(),
            "join_timeout" => conf.join_timeout.replace(time()?).is_some(),
            "outage_timeout" => conf.outage_timeout.replace(time()?).is_some(),
            "takeover_timeout" => conf
                .takeover_timeout
                .replace(takeover(value).map_err(in_key)?)
                .is_some(),
            "last_call_timeout" => conf.last_call_timeout.replace(time()?).is_some(),
            "connect_timeout" | "timeout" => conf.connect_timeout.replace(time()?).is_some(),
            other => {
                conf.ignored.push(other.to_owned());
                false
            }
        };
        if twice {
            return Err(format!("`{key}` is given more than once"));
        }
    }
    Ok(conf)
}

/// Without the quotes for a shell that has not read it.
fn unquoted(text: &str) -> &str {
    let text = text.trim();
    let within = |quote: char| text.strip_prefix(quote)?.strip_suffix(quote);
    within('\'').or_else(|| within('"')).unwrap_or(text).trim()
}

/// `1`, `true`, `yes`, `on` and their opposites, in any case.
pub fn boolean(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" | "on" => Ok(true),
        "0" | "false" | "f" | "no" | "n" | "off" => Ok(false),
        _ => Err("expected `true` or `false`".to_owned()),
    }
}

/// A time in seconds, or with a unit; fractions allowed.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let units = [("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
    let with_unit = |(unit, seconds)| Some((text.strip_suffix(unit)?, seconds));
    let (number, unit) = units.into_iter().find_map(with_unit).unwrap_or((text, 1.0));
    match number.parse::<f64>().map(|number| number * unit) {
        Ok(s) if (0.0..=MAX_TIMEOUT_S).contains(&s) => Ok(Duration::from_secs_f64(s)),
        _ => Err("expected seconds from 0, for example `30` or `0.5`, or a time like `5m`".to_owned()),
    }
}

/// A whole number from 0.
pub fn whole(text: &str) -> Result<u32, String> {
    text.parse()
        .map_err(|_| "expected a whole number from 0".to_owned())
}

/// Name of a job: what may stand in a path and in a key of the daemon.
pub fn job_id(text: &str) -> Result<String, String> {
    let is_id_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '@' | '+');
    let dots_only = text.chars().all(|c| c == '.');
    if text.is_empty() || text.len() > 128 || dots_only || !text.chars().all(is_id_char) {
        return Err("expected 1 to 128 letters, digits or `.-_:@+`".to_owned());
    }
    Ok(text.to_owned())
}

/// Host name or address, without a port.
pub fn local_addr(text: &str) -> Result<String, String> {
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    if bare.parse::<Ipv6Addr>().is_ok() {
        return Ok(bare.to_owned());
    }
    match endpoint(text) {
        Ok(parsed) if parsed.host == text => Ok(parsed.host),
        _ => Err("expected a host name or an address, without a port".to_owned()),
    }
}

/// `key=value` for one value of the YAML, the key dotted: `train.steps=20`.
pub fn assignment(text: &str) -> Result<String, String> {
    const EXPECTED: &str = "expected `section.key=value`, for example `train.steps=20`";
    let (key, _) = text.split_once('=').ok_or(EXPECTED)?;
    let is_key_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    if key.split('.').any(str::is_empty) || !key.chars().all(is_key_char) {
        return Err(EXPECTED.to_owned());
    }
    if key.split('.').next() == Some("launch") {
        return Err("the section `launch` holds defaults for flags: use the flag instead".to_owned());
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_above_zero_is_expected_in_words() {
        assert_eq!(
            one_or_more("3"),
            std::num::NonZeroUsize::new(3).ok_or_else(String::new)
        );
        for bad in ["0", "-1", "x", ""] {
            let refused = one_or_more::<std::num::NonZeroUsize>(bad);
            assert_eq!(
                refused.unwrap_err(),
                "expected a whole number, 1 or more",
                "`{bad}`"
            );
        }
    }

    /// A folder called `~` was made.
    #[test]
    fn a_path_has_no_tilde() {
        assert_eq!(path("logs/~"), Ok("logs/~".into()));
        for bad in ["", "~", "~/logs"] {
            assert!(path(bad).is_err(), "`{bad}` was taken");
        }
    }

    #[test]
    fn nodes_are_a_number_or_a_range() {
        assert_eq!(node_range("2"), Ok(NodeRange { min: 2, max: 2 }));
        assert_eq!(node_range("1:4"), Ok(NodeRange { min: 1, max: 4 }));
        for bad in [
            "", "0", "-1", "4:1", "1:", ":2", "1:2:3", "two", "1:0", "99999999",
        ] {
            assert!(node_range(bad).is_err(), "`{bad}` was taken");
        }
    }

    #[test]
    fn endpoints_have_a_default_port_and_bracketed_ipv6() {
        let parsed = |text: &str| endpoint(text).map(|e| e.to_string());
        assert_eq!(parsed("node0"), Ok("node0:29400".into()));
        assert_eq!(parsed("node0:1234"), Ok("node0:1234".into()));
        assert_eq!(parsed("[fd00::1]"), Ok("[fd00::1]:29400".into()));
        assert_eq!(parsed("[::1]:5"), Ok("[::1]:5".into()));
        assert_eq!(parsed("10.0.0.1"), Ok("10.0.0.1:29400".into()));
        assert_eq!(parsed("[::]:0"), Ok("[::]:0".into()));
        for bad in [
            "", ":1", "fd00::1", "a:b", "a:70000", "[x]:1", "[::1]1", "[::1", "http://a", "a b",
        ] {
            assert!(endpoint(bad).is_err(), "`{bad}` was taken");
        }
    }

    #[test]
    fn worker_counts() {
        assert_eq!(proc_count("8"), Ok(ProcCount::Fixed(8)));
        assert_eq!(proc_count("auto"), Ok(ProcCount::Auto));
        for bad in ["0", "-1", "", "all", "GPU", "1.5"] {
            assert!(proc_count(bad).is_err(), "`{bad}` was taken");
        }
    }

    #[test]
    fn rdzv_conf_refuses_what_it_cannot_read() {
        let conf = rdzv_conf("is_host=1, join_timeout=2.5").expect("valid");
        assert_eq!(conf.is_host, Some(true));
        assert_eq!(conf.join_timeout, Some(Duration::from_millis(2500)));
        let message = |text| rdzv_conf(text).expect_err("must be refused");
        let quoted = rdzv_conf(r#"'is_host="1", port=1,join_timeout = 3'"#).expect("valid");
        assert_eq!(quoted.is_host, Some(true));
        assert_eq!(quoted.join_timeout, Some(Duration::from_secs(3)));
        assert_eq!(quoted.ignored, ["port"], "torchrun takes every key");
        insta::assert_snapshot!(message("is_host=perhaps"), @"`is_host=perhaps`: expected `true` or `false`");
        insta::assert_snapshot!(message("is_host"), @"`is_host` is not of the form `key=value`");
        insta::assert_snapshot!(message("is_host=1,is_host=0"), @"`is_host` is given more than once");
    }

    #[test]
    fn times_ids_and_addresses() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(
            ["5m", "1.5h", "30s", "250ms"].map(seconds),
            [300_000, 5_400_000, 30_000, 250].map(|ms| Ok(Duration::from_millis(ms)))
        );
        for bad in ["-1", "NaN", "inf", "", "1e30", "m", "5 m", "5d", "721h"] {
            assert!(seconds(bad).is_err(), "`{bad}` was taken");
        }
        assert!(job_id("job-1").is_ok());
        for bad in ["", "..", "a/b", "a b", &"x".repeat(129)] {
            assert!(job_id(bad).is_err(), "`{bad}` was taken");
        }
        assert_eq!(local_addr("::1"), Ok("::1".into()));
        assert_eq!(local_addr("10.0.0.1"), Ok("10.0.0.1".into()));
        assert!(local_addr("node0:1").is_err());
    }

    #[test]
    fn overrides_are_checked_for_their_form() {
        assert_eq!(assignment("train.steps=20"), Ok("train.steps=20".into()));
        assert_eq!(assignment("data.train=a=b"), Ok("data.train=a=b".into()));
        for bad in ["train.steps", "=1", ".a=1", "a..b=1", "launch.nnodes=2"] {
            assert!(assignment(bad).is_err(), "`{bad}` was taken");
        }
    }
}
