//! What operators measure, sent to a collector of OpenTelemetry: metrics, and each generation of a job as a span with the
//! reasons why it began and ended. For daemons that no Prometheus finds, as those within launchers.
//!
//! OTLP over gRPC, without TLS: a collector on the same machine or in the same cluster takes it from there. What cannot
//! be delivered costs the jobs nothing: metrics are lost, spans wait for the next attempt within their bound.

use std::collections::{BTreeMap, VecDeque};
use std::error::Error as _;
use std::str::FromStr as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ddp_proto::printable;
use ddp_proto::resolver::Resolver;
use hyper_util::client::legacy::connect::HttpConnector;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_client::MetricsServiceClient;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value as Number;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, ResourceMetrics,
    ScopeMetrics, Sum,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span};
use percent_encoding::percent_decode_str;
use prometheus_client::encoding::prometheus_protobuf::prometheus_data_model as prometheus;
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, timeout};
use tonic::metadata::{Ascii, MetadataKey, MetadataMap, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::actor;
use super::http::ask;
use super::metrics::{MAX_LABELLED_JOBS, Metrics};
use crate::rendezvous::event::EndedGeneration;
use crate::rendezvous::kv::clip;

/// Where to send, as OpenTelemetry names it.
const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const HEADERS: &str = "OTEL_EXPORTER_OTLP_HEADERS";
const TIMEOUT: &str = "OTEL_EXPORTER_OTLP_TIMEOUT";
const PROTOCOL: &str = "OTEL_EXPORTER_OTLP_PROTOCOL";
const INTERVAL: &str = "OTEL_METRIC_EXPORT_INTERVAL";
const ATTRIBUTES: &str = "OTEL_RESOURCE_ATTRIBUTES";
const NAME: &str = "OTEL_SERVICE_NAME";
/// What is sent, each with the variable by which it is not wanted.
const METRICS: (&str, &str) = ("metrics", "OTEL_METRICS_EXPORTER");
const SPANS: (&str, &str) = ("spans", "OTEL_TRACES_EXPORTER");
/// Generations that wait for the collector: 64 jobs that are restarted 16 times while it is away.
const MAX_WAITING: usize = 1024;
/// Spans of one message: with two reasons of 1 KiB each, a tenth of what collectors take.
const MAX_SPANS: usize = 128;
/// Bytes that are shown of a collector's words.
const MAX_WORDS: usize = 256;
/// How long the daemon stays for the last export.
const LAST_EXPORT: Duration = Duration::from_secs(2);

/// A collector of OpenTelemetry, and what it is to know of this daemon.
#[derive(Clone, Debug)]
pub struct Collector {
    endpoint: Endpoint,
    connector: HttpConnector<Resolver>,
    headers: MetadataMap,
    every: Duration,
    resource: Resource,
    wants: [bool; 2],
}

/// A variable of OpenTelemetry that cannot be used: what it is set to, unless that may be a secret, and what was expected.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable} is `{value}`: {problem}")]
struct Unusable {
    variable: &'static str,
    value: String,
    problem: String,
}

impl Collector {
    /// The one that the variables of OpenTelemetry name, read by `variable`. They may be meant for others: where one cannot
    /// be used, a warning says so, and nothing is sent.
    pub fn from_environment(variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        Self::try_from_environment(variable).unwrap_or_else(|unusable| {
            tracing::warn!("neither metrics nor spans are sent: {unusable}");
            None
        })
    }

    fn try_from_environment(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, Unusable> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let is = |name, word: &str| variable(name).is_some_and(|value| value.eq_ignore_ascii_case(word));
        let wants = [METRICS, SPANS].map(|(_, exporter)| !is(exporter, "none"));
        let is_wanted = wants != [false; 2] && !is("OTEL_SDK_DISABLED", "true");
        let Some(address) = variable(ENDPOINT).filter(|_| is_wanted) else {
            return Ok(None);
        };
        if let Some(protocol) = variable(PROTOCOL).filter(|protocol| protocol != "grpc") {
            return Err(unusable(PROTOCOL, &protocol, "this program has `grpc` only"));
        }
        let millis = |name, default| match variable(name) {
            None => Ok(Duration::from_millis(default)),
            Some(text) => match text.parse() {
                Ok(millis) if millis > 0 => Ok(Duration::from_millis(millis)),
                _ => Err(unusable(name, &text, "expected milliseconds, 1 or more")),
            },
        };
        let (endpoint, connector) = target(&address, millis(TIMEOUT, 10_000)?)?;
        let mut headers = MetadataMap::new();
        // What a header holds may be a secret.
        let bad_headers = || unusable(HEADERS, "…", "expected `name=value,name=value`, percent-encoded");
        for (name, value) in pairs(&variable(HEADERS).unwrap_or_default()).ok_or_else(bad_headers)? {
            let name = MetadataKey::<Ascii>::from_str(&name).map_err(|_| bad_headers())?;
            let mut value = MetadataValue::from_str(&value).map_err(|_| bad_headers())?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        let text = variable(ATTRIBUTES).unwrap_or_default();
        let bad_attributes = || unusable(ATTRIBUTES, &text, "expected `name=value,name=value`");
        let given = pairs(&text).ok_or_else(bad_attributes)?;
        Ok(Some(Self {
            endpoint,
            connector,
            headers,
            every: millis(INTERVAL, 60_000)?,
            resource: resource(given, variable(NAME)),
            wants,
        }))
    }
}

/// What is given, and what this daemon says of itself where nothing is. No two daemons are of one name and instance: a
/// collector would take the numbers of one for those of the other.
fn resource(given: Vec<(String, String)>, name: Option<String>) -> Resource {
    let host = nix::unistd::gethostname().unwrap_or_default();
    let own = [
        ("service.name", "ddp-rendezvous".to_owned()),
        ("service.version", env!("CARGO_PKG_VERSION").to_owned()),
        ("service.instance.id", format!("{:032x}", rand::random::<u128>())),
        ("host.name", host.to_string_lossy().into_owned()),
    ];
    let mut attributes: BTreeMap<_, _> = own.map(|(name, value)| (name.to_owned(), value)).into();
    attributes.extend(given);
    attributes.extend(name.map(|name| ("service.name".to_owned(), name)));
    Resource {
        attributes: attributes
            .iter()
            .map(|(name, value)| text_attribute(name, value))
            .collect(),
        ..Resource::default()
    }
}

fn target(address: &str, timeout: Duration) -> Result<(Endpoint, HttpConnector<Resolver>), Unusable> {
    let expected = "expected `http://host:4317`: OTLP over gRPC without TLS, to a collector nearby";
    // With a user comes a password.
    let shown = if address.contains('@') { "…" } else { address };
    let wrong = || unusable(ENDPOINT, shown, expected);
    if !address.starts_with("http://") || address.contains('@') {
        return Err(wrong());
    }
    let endpoint = Endpoint::from_shared(address.to_owned()).map_err(|_| wrong())?;
    let host = endpoint.uri().host().ok_or_else(wrong)?;
    let resolver = Resolver::start(host).map_err(|error| unusable(ENDPOINT, shown, &error.to_string()))?;
    let mut connector = HttpConnector::new_with_resolver(resolver);
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(timeout));
    Ok((endpoint.connect_timeout(timeout).timeout(timeout), connector))
}

fn unusable(variable: &'static str, value: &str, problem: &str) -> Unusable {
    Unusable {
        variable,
        value: printable::line(value).into_owned(),
        problem: problem.to_owned(),
    }
}

/// `a=b,c=d` percent-encoded, as in the header `baggage` of W3C; none if it is not that.
fn pairs(text: &str) -> Option<Vec<(String, String)>> {
    let written = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
    written
        .map(|pair| {
            let (name, value) = pair.split_once('=')?;
            let decoded = |text: &str| {
                let text = percent_decode_str(text.trim()).decode_utf8().ok()?;
                Some(text.into_owned())
            };
            let (name, value) = (decoded(name)?, decoded(value)?);
            (!name.is_empty()).then_some((name, value))
        })
        .collect()
}

/// Sends what the daemon looks like to its collector.
#[derive(Debug)]
pub(super) struct Exporter {
    collector: Collector,
    requests: mpsc::Sender<actor::Request>,
    metrics: Arc<Metrics>,
    began: SystemTime,
    /// Of metrics, and of spans. Locked during an export: there is one at a time.
    reach: Mutex<[Reach; 2]>,
}

/// Whether metrics, or spans, reach the collector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    /// They do, as far as is known.
    Through,
    /// The last attempt failed, and a warning said so.
    Away,
    /// The collector takes none, or none is to be sent.
    Unwanted,
}

/// Generations that have ended, each with the time of its end, until a collector has them, if there is one.
#[derive(Debug, Default)]
pub(super) struct WaitingSpans {
    is_wanted: AtomicBool,
    waiting: std::sync::Mutex<VecDeque<(SystemTime, EndedGeneration)>>,
}

impl WaitingSpans {
    /// Whether any are kept from now on.
    fn want(&self, is_wanted: bool) {
        self.is_wanted.store(is_wanted, Ordering::Relaxed);
        if !is_wanted {
            self.waiting().clear();
        }
    }

    pub(super) fn note(&self, ended: &EndedGeneration) {
        if !self.is_wanted.load(Ordering::Relaxed) {
            return;
        }
        let mut waiting = self.waiting();
        if waiting.len() >= MAX_WAITING {
            waiting.pop_front();
        }
        waiting.push_back((SystemTime::now(), ended.clone()));
    }

    /// The first ones, as many as one message holds.
    fn take(&self) -> Vec<(SystemTime, EndedGeneration)> {
        let mut waiting = self.waiting();
        let some = waiting.len().min(MAX_SPANS);
        waiting.drain(..some).collect()
    }

    /// They wait again, unless later ones have taken their room.
    fn give_back(&self, ended: Vec<(SystemTime, EndedGeneration)>) {
        let mut waiting = self.waiting();
        for generation in ended.into_iter().rev() {
            if waiting.len() < MAX_WAITING {
                waiting.push_front(generation);
            }
        }
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<(SystemTime, EndedGeneration)>> {
        // Nothing panics that holds it.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Exporter {
    /// Exports again and again, as one of `tasks`, if there is a collector.
    pub(super) fn start<E: Send + 'static>(
        collector: Option<Collector>,
        requests: &mpsc::Sender<actor::Request>,
        metrics: &Arc<Metrics>,
        tasks: &mut JoinSet<Result<(), E>>,
    ) -> Option<Arc<Self>> {
        let collector = collector?;
        let reach = (collector.wants).map(|is_wanted| {
            if is_wanted {
                Reach::Through
            } else {
                Reach::Unwanted
            }
        });
        metrics.spans.want(collector.wants[1]);
        let exporter = Arc::new(Self {
            collector,
            requests: requests.clone(),
            metrics: metrics.clone(),
            began: SystemTime::now(),
            reach: Mutex::new(reach),
        });
        let repeated = exporter.clone();
        tasks.spawn(async move {
            repeated.run().await;
            Ok(())
        });
        Some(exporter)
    }

    /// Exports for the last time. What cannot be sent in time is lost: the jobs are over.
    pub(super) async fn finish(exporter: Option<Arc<Self>>) {
        if let Some(exporter) = exporter {
            let _ = timeout(LAST_EXPORT, exporter.export()).await;
        }
    }

    async fn run(&self) {
        let mut ticks = tokio::time::interval(self.collector.every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.export().await;
        }
    }

    /// Sends what there is now, over a connection of its own: one that is kept may lead nowhere by the next time.
    async fn export(&self) {
        let mut reach = self.reach.lock().await;
        let [metrics, spans] = &mut *reach;
        let channel = (self.collector.endpoint).connect_with_connector_lazy(self.collector.connector.clone());
        if *metrics != Reach::Unwanted {
            let exported = self.export_metrics(channel.clone()).await;
            self.tell(metrics, METRICS.0, exported);
        }
        if *spans != Reach::Unwanted {
            let exported = self.export_spans(channel).await;
            self.tell(spans, SPANS.0, exported);
            self.metrics.spans.want(*spans != Reach::Unwanted);
        }
    }

    /// Tells when the collector goes away and when it is back, not at each attempt.
    fn tell(&self, reach: &mut Reach, what: &str, exported: Result<(), Status>) {
        let address = self.collector.endpoint.uri();
        match exported {
            Err(error) if error.code() == Code::Unimplemented => {
                tracing::warn!("the collector at {address} ({ENDPOINT}) takes no {what}: none are sent");
                *reach = Reach::Unwanted;
            }
            Err(error) => {
                if *reach == Reach::Through {
                    let why = why(&error);
                    tracing::warn!("{what} do not reach the collector at {address} ({ENDPOINT}): {why}");
                }
                *reach = Reach::Away;
            }
            Ok(()) => {
                if *reach == Reach::Away {
                    tracing::info!("{what} reach the collector at {address} again");
                }
                *reach = Reach::Through;
            }
        }
    }

    async fn export_metrics(&self, channel: Channel) -> Result<(), Status> {
        let census = |answer| actor::Request::Census(MAX_LABELLED_JOBS, answer);
        let census = ask(&self.requests, census).await;
        let census = census.ok_or_else(|| Status::unavailable("the daemon had no time for it"))?;
        let began = nanos(self.began);
        let now = nanos(SystemTime::now()).max(began);
        let families = self.metrics.families(&census).into_iter();
        let scope_metrics = ScopeMetrics {
            scope: Some(scope()),
            metrics: families.filter_map(|family| metric(family, began, now)).collect(),
            ..ScopeMetrics::default()
        };
        let request = ExportMetricsServiceRequest {
            resource_metrics: vec![ResourceMetrics {
                resource: Some(self.collector.resource.clone()),
                scope_metrics: vec![scope_metrics],
                ..ResourceMetrics::default()
            }],
        };
        let mut metrics = MetricsServiceClient::new(channel);
        metrics.export(self.request(request)).await?;
        Ok(())
    }

    /// The generations that have ended since. Those that could not be sent stay, unless the collector refuses them.
    async fn export_spans(&self, channel: Channel) -> Result<(), Status> {
        loop {
            let ended = self.metrics.spans.take();
            if ended.is_empty() {
                return Ok(());
            }
            let spans = ended.iter().map(|(at, ended)| self.span(*at, ended));
            if let Err(error) = self.send(channel.clone(), spans.collect()).await {
                if may_be_sent_again(error.code()) {
                    self.metrics.spans.give_back(ended);
                }
                return Err(error);
            }
        }
    }

    fn span(&self, at: SystemTime, ended: &EndedGeneration) -> Span {
        let EndedGeneration {
            job,
            job_began,
            generation,
        } = ended;
        let before = |millis: u64| nanos(at).saturating_sub(millis.saturating_mul(1_000_000));
        // The same for all generations of a job, and for no other job; and the same when one is sent again.
        let mut hash = blake3::Hasher::new();
        hash.update(&nanos(self.began).to_le_bytes());
        hash.update(&job_began.as_nanos().to_le_bytes());
        hash.update(job.as_bytes());
        let trace_id = hash.finalize().as_bytes()[..16].to_vec();
        hash.update(&generation.generation.to_le_bytes());
        let span_id = hash.finalize().as_bytes()[16..24].to_vec();
        let whole = |number: u32| Value::IntValue(number.into());
        Span {
            trace_id,
            span_id,
            name: format!("generation {}", generation.generation),
            kind: SpanKind::Internal.into(),
            start_time_unix_nano: before(generation.began_ms),
            end_time_unix_nano: before(generation.ended_ms.unwrap_or(0)),
            attributes: vec![
                text_attribute("ddp.job_id", job),
                attribute("ddp.generation", Value::IntValue(generation.generation as i64)),
                attribute("ddp.nodes", whole(generation.nodes)),
                attribute("ddp.ranks", whole(generation.ranks)),
                text_attribute("ddp.began", &generation.began),
                text_attribute("ddp.ended", &generation.ended),
            ],
            ..Span::default()
        }
    }

    async fn send(&self, channel: Channel, spans: Vec<Span>) -> Result<(), Status> {
        let request = ExportTraceServiceRequest {
            resource_spans: vec![ResourceSpans {
                resource: Some(self.collector.resource.clone()),
                scope_spans: vec![ScopeSpans {
                    scope: Some(scope()),
                    spans,
                    ..ScopeSpans::default()
                }],
                ..ResourceSpans::default()
            }],
        };
        let mut traces = TraceServiceClient::new(channel);
        traces.export(self.request(request)).await?;
        Ok(())
    }

    fn request<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        *request.metadata_mut() = self.collector.headers.clone();
        request
    }
}

/// As the specification of OTLP has it; what breaks on the way has the code of an unknown error or of a cancelled call.
fn may_be_sent_again(code: Code) -> bool {
    matches!(
        code,
        Code::Cancelled
            | Code::Unknown
            | Code::DeadlineExceeded
            | Code::ResourceExhausted
            | Code::Aborted
            | Code::OutOfRange
            | Code::Unavailable
            | Code::DataLoss
    )
}

/// What went wrong, and what was behind it.
fn why(error: &Status) -> String {
    let causes = std::iter::successors(error.source(), |&error| error.source());
    let mut words = error.message().to_owned();
    if let Some(root) = causes.last().map(ToString::to_string)
        && !words.contains(&root)
    {
        words = format!("{words}: {root}");
    }
    clip(&printable::line(&words), MAX_WORDS).to_owned()
}

fn scope() -> InstrumentationScope {
    InstrumentationScope {
        name: "ddp_run::rendezvous".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    }
}

fn nanos(time: SystemTime) -> u64 {
    // A clock before 1970 is no reason to end.
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
}

fn attribute(name: &str, value: Value) -> KeyValue {
    KeyValue {
        key: name.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
        ..KeyValue::default()
    }
}

fn text_attribute(name: &str, text: &str) -> KeyValue {
    attribute(name, Value::StringValue(text.to_owned()))
}

fn attributes(labels: &[prometheus::LabelPair]) -> Vec<KeyValue> {
    let labels = labels.iter();
    labels
        .map(|label| text_attribute(&label.name, &label.value))
        .collect()
}

/// The same metric in the other model, under the same name; none if it has no samples.
fn metric(family: prometheus::MetricFamily, began: u64, now: u64) -> Option<Metric> {
    let cumulative = AggregationTemporality::Cumulative.into();
    let points = |value: fn(&prometheus::Metric) -> Option<f64>, start| {
        let points = family.metric.iter().filter_map(|sample| {
            Some(NumberDataPoint {
                attributes: attributes(&sample.label),
                start_time_unix_nano: start,
                time_unix_nano: now,
                value: Some(Number::AsDouble(value(sample)?)),
                ..NumberDataPoint::default()
            })
        });
        points.collect()
    };
    let first = family.metric.first()?;
    let data = if first.counter.is_some() {
        Data::Sum(Sum {
            data_points: points(|sample| Some(sample.counter.as_ref()?.value), began),
            aggregation_temporality: cumulative,
            is_monotonic: true,
        })
    } else if first.histogram.is_some() {
        let points = family.metric.iter().filter_map(|sample| {
            Some(HistogramDataPoint {
                attributes: attributes(&sample.label),
                start_time_unix_nano: began,
                time_unix_nano: now,
                ..distribution(sample.histogram.as_ref()?)
            })
        });
        Data::Histogram(Histogram {
            data_points: points.collect(),
            aggregation_temporality: cumulative,
        })
    } else {
        Data::Gauge(Gauge {
            // What it was at one time has no start.
            data_points: points(|sample| Some(sample.gauge.as_ref()?.value), 0),
        })
    };
    Some(Metric {
        name: family.name,
        description: family.help,
        data: Some(data),
        ..Metric::default()
    })
}

/// Buckets count what those before them count too, up to an infinite bound; here each counts its own, and the last one
/// has no bound.
fn distribution(histogram: &prometheus::Histogram) -> HistogramDataPoint {
    let bounds = histogram.bucket.iter().map(|bucket| bucket.upper_bound);
    let bounds: Vec<_> = bounds.filter(|bound| bound.is_finite()).collect();
    let counts = histogram.bucket.iter().map(|bucket| bucket.cumulative_count);
    let mut before = 0;
    let counts = counts.take(bounds.len()).chain([histogram.sample_count]);
    HistogramDataPoint {
        count: histogram.sample_count,
        sum: Some(histogram.sample_sum),
        bucket_counts: counts
            .map(|count| {
                let own = count.saturating_sub(before);
                before = count;
                own
            })
            .collect(),
        explicit_bounds: bounds,
        ..HistogramDataPoint::default()
    }
}

#[cfg(test)]
mod tests {
    use ddp_proto::rendezvous::GenerationStatus;
    use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceResponse;
    use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_server::{
        MetricsService, MetricsServiceServer,
    };
    use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
    use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
        TraceService, TraceServiceServer,
    };
    use tokio::net::TcpListener;
    use tokio_stream::wrappers::TcpListenerStream;
    use tonic::{Request, Response};

    use super::*;
    use crate::rendezvous::event::{Effect, Observation};
    use crate::rendezvous::report::Census;

    /// Keeps what it is sent, with the header `tenant`.
    #[derive(Clone)]
    struct Receiver(mpsc::UnboundedSender<Received>);

    #[derive(Debug)]
    enum Received {
        Metrics(Option<String>, Vec<ResourceMetrics>),
        Spans(Vec<Span>),
    }

    #[tonic::async_trait]
    impl MetricsService for Receiver {
        async fn export(
            &self,
            request: Request<ExportMetricsServiceRequest>,
        ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
            let tenant = request.metadata().get("tenant");
            let tenant = tenant.map(|value| value.to_str().unwrap().to_owned());
            let metrics = request.into_inner().resource_metrics;
            self.0.send(Received::Metrics(tenant, metrics)).unwrap();
            Ok(Response::new(ExportMetricsServiceResponse::default()))
        }
    }

    #[tonic::async_trait]
    impl TraceService for Receiver {
        async fn export(
            &self,
            request: Request<ExportTraceServiceRequest>,
        ) -> Result<Response<ExportTraceServiceResponse>, Status> {
            let resources = request.into_inner().resource_spans.into_iter();
            let scopes = resources.flat_map(|resource| resource.scope_spans);
            let spans = scopes.flat_map(|scope| scope.spans).collect();
            self.0.send(Received::Spans(spans)).unwrap();
            Ok(Response::new(ExportTraceServiceResponse::default()))
        }
    }

    fn collector(more: &[(&str, &str)]) -> Result<Option<Collector>, Unusable> {
        Collector::try_from_environment(|name| {
            let set = more.iter().find(|(set, _)| *set == name);
            set.map(|(_, value)| (*value).to_owned())
        })
    }

    /// A daemon with the job `a`.
    fn daemon() -> mpsc::Sender<actor::Request> {
        let (requests, mut asked) = mpsc::channel(8);
        tokio::spawn(async move {
            while let Some(actor::Request::Census(_, answer)) = asked.recv().await {
                let census = Census {
                    nodes: 3,
                    connected: 2,
                    generations: vec![("a".into(), 3)],
                    ..Census::default()
                };
                answer.send(census).unwrap();
            }
        });
        requests
    }

    fn ended(job: &str, number: u64) -> Effect {
        let generation = GenerationStatus {
            generation: number,
            nodes: 2,
            ranks: 16,
            began: "the job began".into(),
            ended: "rank 3 died".into(),
            began_ms: 1000,
            ended_ms: Some(0),
        };
        Effect::GenerationEnded(Box::new(EndedGeneration {
            job: job.into(),
            job_began: Duration::from_secs(1),
            generation,
        }))
    }

    /// A collector that takes spans, and metrics if it is to.
    fn serve(listener: TcpListener, takes_metrics: bool) -> mpsc::UnboundedReceiver<Received> {
        let (received, receive) = mpsc::unbounded_channel();
        let receiver = Receiver(received);
        let server = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(receiver.clone()))
            .add_optional_service(takes_metrics.then(|| MetricsServiceServer::new(receiver)))
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::spawn(server);
        receive
    }

    fn exporter(address: &str, more: &[(&str, &str)]) -> Arc<Exporter> {
        let address = format!("http://{address}");
        let mut variables = vec![(ENDPOINT, &*address), (INTERVAL, "3600000")];
        variables.extend_from_slice(more);
        let collector = collector(&variables).unwrap();
        let metrics = Arc::new(Metrics::new());
        metrics.heartbeat(Duration::from_secs(3));
        metrics.heartbeat(Duration::from_mins(5));
        metrics.note(&Effect::Observed(Observation::Ended(78)));
        Exporter::start::<()>(collector, &daemon(), &metrics, &mut JoinSet::new()).unwrap()
    }

    fn number(metrics: &[Metric], name: &str, label: &str) -> f64 {
        let metric = metrics.iter().find(|metric| metric.name == name).unwrap();
        let points = match metric.data.as_ref().unwrap() {
            Data::Gauge(gauge) => &gauge.data_points,
            Data::Sum(sum) => &sum.data_points,
            other => panic!("{other:?}"),
        };
        let point = points.iter().find(|point| match point.attributes.as_slice() {
            [only] => *only == text_attribute(&only.key, label),
            _ => label.is_empty(),
        });
        match point.unwrap().value.unwrap() {
            Number::AsDouble(number) => number,
            Number::AsInt(number) => number as f64,
        }
    }

    #[tokio::test]
    async fn a_collector_is_sent_what_metrics_say_and_each_generation_once() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let mut receive = serve(listener, true);
        let more = [
            (HEADERS, "tenant=team%20a"),
            (ATTRIBUTES, "cluster=one,host.name=here,service.name=b"),
            (NAME, "nightly"),
        ];
        let exporter = exporter(&address, &more);
        for effect in [ended("a", 1), ended("a", 2), ended("b", 1)] {
            exporter.metrics.note(&effect);
        }
        exporter.export().await;
        let Some(Received::Metrics(tenant, resources)) = receive.recv().await else {
            panic!()
        };
        assert_eq!(tenant.unwrap(), "team a");
        let resource = &resources[0].resource.as_ref().unwrap().attributes;
        let names: Vec<_> = resource.iter().map(|pair| pair.key.as_str()).collect();
        let own = ["service.instance.id", "service.name", "service.version"];
        assert_eq!(names, [&["cluster", "host.name"], &own[..]].concat());
        for (name, value) in [
            ("cluster", "one"),
            ("host.name", "here"),
            ("service.name", "nightly"),
        ] {
            assert!(resource.contains(&text_attribute(name, value)), "{name}");
        }
        let metrics = &resources[0].scope_metrics[0].metrics;
        assert_eq!(number(metrics, "ddp_nodes", "away"), 1.0);
        assert_eq!(number(metrics, "ddp_jobs_ended_total", "closed"), 1.0);
        assert_eq!(number(metrics, "ddp_job_generation", "a"), 3.0);
        assert_eq!(number(metrics, "ddp_build_info", env!("CARGO_PKG_VERSION")), 1.0);
        let ages = metrics
            .iter()
            .find(|metric| metric.name == "ddp_heartbeat_age_seconds");
        let Some(Data::Histogram(ages)) = ages.unwrap().data.as_ref() else {
            panic!()
        };
        let ages = &ages.data_points[0];
        assert_eq!((ages.count, ages.sum), (2, Some(303.0)));
        assert_eq!(
            ages.explicit_bounds,
            [0.5, 1.0, 2.0, 2.5, 3.0, 3.5, 4.0, 6.0, 9.0, 30.0]
        );
        assert_eq!(ages.bucket_counts, [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1]);

        let Some(Received::Spans(spans)) = receive.recv().await else {
            panic!()
        };
        let names: Vec<_> = spans.iter().map(|span| span.name.as_str()).collect();
        assert_eq!(names, ["generation 1", "generation 2", "generation 1"]);
        assert_eq!(spans[0].trace_id, spans[1].trace_id);
        assert_ne!(spans[0].trace_id, spans[2].trace_id, "another job");
        assert_ne!(spans[0].span_id, spans[1].span_id);
        assert_eq!(
            spans[0].end_time_unix_nano - spans[0].start_time_unix_nano,
            1_000_000_000
        );
        assert!(
            spans[0]
                .attributes
                .contains(&text_attribute("ddp.ended", "rank 3 died"))
        );

        Exporter::finish(Some(exporter)).await;
        assert!(matches!(receive.recv().await, Some(Received::Metrics(..))));
        assert!(receive.try_recv().is_err(), "no generation has ended since");
    }

    #[tokio::test]
    async fn spans_wait_for_a_collector_that_is_away_and_go_to_one_that_takes_no_metrics() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let exporter = exporter(&address.to_string(), &[]);
        exporter.metrics.note(&ended("a", 1));
        exporter.export().await;
        assert_eq!(*exporter.reach.lock().await, [Reach::Away; 2]);
        let mut receive = serve(TcpListener::bind(address).await.unwrap(), false);
        exporter.export().await;
        assert_eq!(*exporter.reach.lock().await, [Reach::Unwanted, Reach::Through]);
        let Some(Received::Spans(spans)) = receive.recv().await else {
            panic!()
        };
        assert_eq!(spans.len(), 1);
    }

    #[tokio::test]
    async fn a_span_that_is_sent_again_is_the_same() {
        let exporter = exporter("127.0.0.1:1", &[]);
        exporter.metrics.note(&ended("a", 1));
        let ids = || {
            let waiting = exporter.metrics.spans.take();
            let span = exporter.span(waiting[0].0, &waiting[0].1);
            exporter.metrics.spans.give_back(waiting);
            (span.trace_id, span.span_id)
        };
        let first = ids();
        assert_eq!((first.0.len(), first.1.len()), (16, 8));
        assert_eq!(first, ids());
    }

    #[test]
    fn what_a_collector_says_is_one_line_with_its_cause() {
        let mut error = Status::unavailable("away\n\x1b[31m");
        error.set_source(Arc::new(std::io::Error::other("connection refused")));
        assert_eq!(why(&error), "away\u{fffd}: connection refused");
        assert!(may_be_sent_again(Code::Unavailable) && !may_be_sent_again(Code::InvalidArgument));
    }

    #[test]
    fn who_wants_no_generations_keeps_none_and_who_does_has_the_last_ones() {
        let spans = WaitingSpans::default();
        let note = |number| {
            let Effect::GenerationEnded(ended) = ended("a", number) else {
                panic!()
            };
            spans.note(&ended);
        };
        let numbers = |some: &[(SystemTime, EndedGeneration)]| -> Vec<_> {
            some.iter()
                .map(|(_, ended)| ended.generation.generation)
                .collect()
        };
        note(1);
        assert!(spans.take().is_empty());
        spans.want(true);
        (1..=MAX_WAITING as u64 + 2).for_each(note);
        let first = spans.take();
        assert_eq!(numbers(&first), (3..3 + MAX_SPANS as u64).collect::<Vec<_>>());
        note(5000);
        spans.give_back(first);
        assert_eq!(spans.waiting().len(), MAX_WAITING);
        assert_eq!(spans.take()[0].1.generation.generation, 4, "the oldest made room");
        spans.want(false);
        assert!(spans.take().is_empty());
    }

    #[test]
    fn variables_that_cannot_be_used_are_named_and_headers_are_not_shown() {
        assert!(collector(&[]).unwrap().is_none());
        assert!(collector(&[(ENDPOINT, "")]).unwrap().is_none());
        let disabled = [(ENDPOINT, "http://a:4317"), ("OTEL_SDK_DISABLED", "True")];
        assert!(collector(&disabled).unwrap().is_none());
        for off in [
            [
                ("OTEL_TRACES_EXPORTER", "none"),
                ("OTEL_METRICS_EXPORTER", "none"),
            ],
            [(PROTOCOL, "grpc"), ("OTEL_SDK_DISABLED", "true")],
        ] {
            let variables = [&[(ENDPOINT, "http://127.0.0.1:4317")][..], &off].concat();
            assert!(collector(&variables).unwrap().is_none());
        }
        let only_spans = [
            (ENDPOINT, "http://127.0.0.1:4317"),
            ("OTEL_METRICS_EXPORTER", "none"),
        ];
        assert_eq!(collector(&only_spans).unwrap().unwrap().wants, [false, true]);
        let refused = |name, value| {
            let error = collector(&[(ENDPOINT, "http://127.0.0.1:4317"), (name, value)]).unwrap_err();
            error.to_string()
        };
        let expected = "OTEL_METRIC_EXPORT_INTERVAL is `0`: expected milliseconds, 1 or more";
        assert_eq!(refused(INTERVAL, "0"), expected);
        assert!(refused(TIMEOUT, "10s").contains("OTEL_EXPORTER_OTLP_TIMEOUT is `10s`"));
        assert!(refused(PROTOCOL, "http/protobuf").contains("`grpc` only"));
        assert!(refused(ATTRIBUTES, "cluster").contains("`cluster`: expected `name=value,name=value`"));
        for secret in [
            "authorization=a\nsecret",
            "secret",
            "a b=secret",
            "=secret",
            "a=%ffsecret",
        ] {
            let error = refused(HEADERS, secret);
            assert!(error.contains(HEADERS) && !error.contains("secret"), "{error}");
        }
        for address in ["https://a:4317", "a:4317", "http://", "http://a b"] {
            let error = collector(&[(ENDPOINT, address)]).unwrap_err().to_string();
            assert!(
                error.contains(address) && error.contains("expected `http://host:4317`"),
                "{error}"
            );
        }
    }
}
