//! What operators measure, sent to a collector of OpenTelemetry: metrics, and each generation of a job as a span with the
//! reasons why it began and ended. For daemons that no Prometheus finds, as those within launchers.
//!
//! OTLP over gRPC, without TLS: a collector on the same machine or in the same cluster takes it from there. What cannot
//! be delivered costs the jobs nothing: metrics are lost, spans wait for the next attempt within their bound.

use std::collections::{HashMap, VecDeque};
use std::str::FromStr as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

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

use super::actor;
use super::http::ask;
use super::metrics::{MAX_LABELLED_JOBS, Metrics};
use crate::rendezvous::event::Past;

/// Where to send, as OpenTelemetry names it.
const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const HEADERS: &str = "OTEL_EXPORTER_OTLP_HEADERS";
const TIMEOUT: &str = "OTEL_EXPORTER_OTLP_TIMEOUT";
const INTERVAL: &str = "OTEL_METRIC_EXPORT_INTERVAL";
const ATTRIBUTES: &str = "OTEL_RESOURCE_ATTRIBUTES";
const NAME: &str = "OTEL_SERVICE_NAME";
/// Generations that wait for the collector: 64 jobs that are restarted 16 times while it is away.
const MAX_WAITING: usize = 1024;
/// Spans of one message: with two reasons of 1 KiB each, a tenth of what collectors take.
const MAX_SPANS: usize = 128;
/// How long the daemon stays for the last export.
const LAST_EXPORT: Duration = Duration::from_secs(2);

/// A collector of OpenTelemetry, and what it is to know of this daemon.
#[derive(Clone, Debug)]
pub struct Collector {
    endpoint: Endpoint,
    headers: MetadataMap,
    every: Duration,
    resource: Resource,
}

/// A variable of OpenTelemetry that cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable} is `{value}`: {problem}")]
pub struct CollectorError {
    /// Its name.
    pub variable: &'static str,
    /// What it is set to, unless that may be a secret.
    pub value: String,
    /// What was expected.
    pub problem: &'static str,
}

impl Collector {
    /// The one that the variables of OpenTelemetry name, read by `variable`; none if they name none.
    pub fn from_environment(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, CollectorError> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let disabled = variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let Some(address) = variable(ENDPOINT).filter(|_| !disabled) else {
            return Ok(None);
        };
        let millis = |name, default| match variable(name) {
            None => Ok(Duration::from_millis(default)),
            Some(text) => match text.parse() {
                Ok(millis) if millis > 0 => Ok(Duration::from_millis(millis)),
                _ => Err(wrong(name, &text, "expected milliseconds, 1 or more")),
            },
        };
        let timeout = millis(TIMEOUT, 10_000)?;
        if !address.starts_with("http://") {
            let problem = "expected `http://host:4317`: OTLP over gRPC without TLS, to a collector nearby";
            return Err(wrong(ENDPOINT, &address, problem));
        }
        let endpoint = Endpoint::from_shared(address.clone())
            .map_err(|_| wrong(ENDPOINT, &address, "expected `http://host:4317`"))?
            .connect_timeout(timeout)
            .timeout(timeout);
        let mut headers = MetadataMap::new();
        // What a header holds may be a secret.
        let unusable = || wrong(HEADERS, "…", "expected `name=value,name=value`, percent-encoded");
        for (name, value) in pairs(&variable(HEADERS).unwrap_or_default()).ok_or_else(unusable)? {
            let name = MetadataKey::<Ascii>::from_str(&name).map_err(|_| unusable())?;
            let mut value = MetadataValue::from_str(&value).map_err(|_| unusable())?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        let text = variable(ATTRIBUTES).unwrap_or_default();
        let given =
            pairs(&text).ok_or_else(|| wrong(ATTRIBUTES, &text, "expected `name=value,name=value`"))?;
        let mut attributes: HashMap<_, _> = given.into_iter().collect();
        if let Some(name) = variable(NAME) {
            attributes.insert("service.name".to_owned(), name);
        }
        let own = [
            ("service.name", "ddp-rendezvous"),
            ("service.version", env!("CARGO_PKG_VERSION")),
        ];
        for (name, value) in own {
            attributes
                .entry(name.to_owned())
                .or_insert_with(|| value.to_owned());
        }
        let mut attributes: Vec<_> = attributes.into_iter().collect();
        attributes.sort_unstable();
        Ok(Some(Self {
            endpoint,
            headers,
            every: millis(INTERVAL, 60_000)?,
            resource: Resource {
                attributes: attributes
                    .iter()
                    .map(|(name, value)| text_attribute(name, value))
                    .collect(),
                ..Resource::default()
            },
        }))
    }
}

fn wrong(variable: &'static str, value: &str, problem: &'static str) -> CollectorError {
    CollectorError {
        variable,
        value: value.to_owned(),
        problem,
    }
}

/// `a=b,c=d` with values that are percent-encoded, as in the header `baggage` of W3C; none if it is not that.
fn pairs(text: &str) -> Option<Vec<(String, String)>> {
    let written = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
    written
        .map(|pair| {
            let (name, value) = pair.split_once('=')?;
            let name = name.trim();
            let value = percent_decode_str(value.trim()).decode_utf8().ok()?;
            (!name.is_empty()).then(|| (name.to_owned(), value.into_owned()))
        })
        .collect()
}

/// Sends what the daemon looks like to its collector.
#[derive(Debug)]
pub(super) struct Exporter {
    collector: Collector,
    channel: Channel,
    requests: mpsc::Sender<actor::Request>,
    metrics: Arc<Metrics>,
    began: SystemTime,
    /// The last attempt failed, and was told of. Held during an export: there is one at a time.
    is_away: Mutex<bool>,
}

/// Generations that have ended, each with the time of its end: as many as may wait for a collector, if there is one.
#[derive(Debug, Default)]
pub(super) struct Ended {
    is_wanted: AtomicBool,
    waiting: std::sync::Mutex<VecDeque<(SystemTime, Past)>>,
}

impl Ended {
    pub(super) fn note(&self, past: &Past) {
        if !self.is_wanted.load(Ordering::Relaxed) {
            return;
        }
        let mut waiting = self.waiting();
        if waiting.len() >= MAX_WAITING {
            waiting.pop_front();
        }
        waiting.push_back((SystemTime::now(), past.clone()));
    }

    /// The first ones, as many as one message holds.
    fn take(&self) -> Vec<(SystemTime, Past)> {
        let mut waiting = self.waiting();
        let some = waiting.len().min(MAX_SPANS);
        waiting.drain(..some).collect()
    }

    /// They wait again, unless later ones have taken their room.
    fn give_back(&self, ended: Vec<(SystemTime, Past)>) {
        let mut waiting = self.waiting();
        for past in ended.into_iter().rev() {
            if waiting.len() < MAX_WAITING {
                waiting.push_front(past);
            }
        }
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<(SystemTime, Past)>> {
        // Nothing panics that holds it.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Exporter {
    /// It exports again and again, as one of `tasks`.
    pub(super) fn start<E: Send + 'static>(
        collector: Collector,
        requests: &mpsc::Sender<actor::Request>,
        metrics: &Arc<Metrics>,
        tasks: &mut JoinSet<Result<(), E>>,
    ) -> Arc<Self> {
        let exporter = Arc::new(Self {
            channel: collector.endpoint.connect_lazy(),
            collector,
            requests: requests.clone(),
            metrics: metrics.clone(),
            began: SystemTime::now(),
            is_away: Mutex::default(),
        });
        exporter.metrics.past.is_wanted.store(true, Ordering::Relaxed);
        let repeated = exporter.clone();
        tasks.spawn(async move {
            repeated.run().await;
            Ok(())
        });
        exporter
    }

    /// Exports for the last time. What cannot be sent in time is lost: the jobs are over.
    pub(super) async fn finish(&self) {
        let _ = timeout(LAST_EXPORT, self.export()).await;
    }

    async fn run(&self) {
        let mut ticks = tokio::time::interval(self.collector.every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.export().await;
        }
    }

    /// Sends what there is now. Tells when the collector goes away and when it is back, not at each attempt.
    async fn export(&self) {
        let mut is_away = self.is_away.lock().await;
        let exported = self.try_export().await;
        let address = self.collector.endpoint.uri();
        match exported {
            Err(ref error) if !*is_away => {
                let why = error.message();
                tracing::warn!("metrics do not reach the collector at {address} ({ENDPOINT}): {why}");
            }
            Ok(()) if *is_away => tracing::info!("metrics reach the collector at {address} again"),
            _ => {}
        }
        *is_away = exported.is_err();
    }

    async fn try_export(&self) -> Result<(), tonic::Status> {
        let census = |answer| actor::Request::Census(MAX_LABELLED_JOBS, answer);
        // An actor without time is asked again next time.
        let Some(census) = ask(&self.requests, census).await else {
            return Ok(());
        };
        let (began, now) = (nanos(self.began), nanos(SystemTime::now()));
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
        let mut metrics = MetricsServiceClient::new(self.channel.clone());
        metrics.export(self.request(request)).await?;
        self.export_spans().await
    }

    /// The generations that have ended since. Those that could not be sent stay.
    async fn export_spans(&self) -> Result<(), tonic::Status> {
        loop {
            let ended = self.metrics.past.take();
            if ended.is_empty() {
                return Ok(());
            }
            let spans = ended.iter().map(|(at, past)| self.span(*at, past));
            if let Err(error) = self.send(spans.collect()).await {
                self.metrics.past.give_back(ended);
                return Err(error);
            }
        }
    }

    fn span(&self, at: SystemTime, past: &Past) -> Span {
        let Past {
            job,
            job_began,
            generation,
        } = past;
        let before = |millis: u64| nanos(at).saturating_sub(millis.saturating_mul(1_000_000));
        // The same for all generations of a job, and for no other job.
        let mut trace = blake3::Hasher::new();
        trace.update(&nanos(self.began).to_le_bytes());
        trace.update(&job_began.as_nanos().to_le_bytes());
        trace.update(job.as_bytes());
        let whole = |number: u32| Value::IntValue(number.into());
        Span {
            trace_id: trace.finalize().as_bytes()[..16].to_vec(),
            span_id: rand::random::<[u8; 8]>().to_vec(),
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

    async fn send(&self, spans: Vec<Span>) -> Result<(), tonic::Status> {
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
        let mut traces = TraceServiceClient::new(self.channel.clone());
        traces.export(self.request(request)).await?;
        Ok(())
    }

    fn request<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        *request.metadata_mut() = self.collector.headers.clone();
        request
    }
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
    use tonic::{Request, Response, Status};

    use super::*;
    use crate::rendezvous::event::{Effect, Observation};
    use crate::rendezvous::state::Census;

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

    fn collector(more: &[(&str, &str)]) -> Result<Option<Collector>, CollectorError> {
        Collector::from_environment(|name| {
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

    fn past(job: &str, number: u64) -> Effect {
        let generation = GenerationStatus {
            generation: number,
            nodes: 2,
            ranks: 16,
            began: "the job began".into(),
            ended: "rank 3 died".into(),
            began_ms: 1000,
            ended_ms: Some(0),
        };
        Effect::Past(Box::new(Past {
            job: job.into(),
            job_began: Duration::from_secs(1),
            generation,
        }))
    }

    fn serve(listener: TcpListener) -> mpsc::UnboundedReceiver<Received> {
        let (received, receive) = mpsc::unbounded_channel();
        let receiver = Receiver(received);
        let server = tonic::transport::Server::builder()
            .add_service(MetricsServiceServer::new(receiver.clone()))
            .add_service(TraceServiceServer::new(receiver))
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::spawn(server);
        receive
    }

    fn exporter(address: &str, more: &[(&str, &str)]) -> Arc<Exporter> {
        let address = format!("http://{address}");
        let mut variables = vec![(ENDPOINT, &*address), (INTERVAL, "3600000")];
        variables.extend_from_slice(more);
        let collector = collector(&variables).unwrap().unwrap();
        let metrics = Arc::new(Metrics::new());
        metrics.heartbeat(Duration::from_secs(3));
        metrics.heartbeat(Duration::from_mins(5));
        metrics.note(&Effect::Observed(Observation::Ended(78)));
        Exporter::start::<()>(collector, &daemon(), &metrics, &mut JoinSet::new())
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
        let mut receive = serve(listener);
        let more = [
            (HEADERS, "tenant=team%20a"),
            (ATTRIBUTES, "cluster=one"),
            (NAME, "nightly"),
        ];
        let exporter = exporter(&address, &more);
        for effect in [past("a", 1), past("a", 2), past("b", 1)] {
            exporter.metrics.note(&effect);
        }
        exporter.export().await;
        let Some(Received::Metrics(tenant, resources)) = receive.recv().await else {
            panic!()
        };
        assert_eq!(tenant.unwrap(), "team a");
        let resource = resources[0].resource.as_ref().unwrap();
        assert_eq!(
            resource.attributes,
            [
                text_attribute("cluster", "one"),
                text_attribute("service.name", "nightly"),
                text_attribute("service.version", env!("CARGO_PKG_VERSION")),
            ]
        );
        let metrics = &resources[0].scope_metrics[0].metrics;
        assert_eq!(number(metrics, "ddp_nodes", "away"), 1.0);
        assert_eq!(number(metrics, "ddp_jobs_ended_total", "closed"), 1.0);
        assert_eq!(number(metrics, "ddp_jobs_ended_total", "success"), 0.0);
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

        exporter.finish().await;
        assert!(matches!(receive.recv().await, Some(Received::Metrics(..))));
        assert!(receive.try_recv().is_err(), "no generation has ended since");
    }

    #[tokio::test]
    async fn a_collector_that_is_away_is_told_of_once_and_gets_the_spans_later() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let exporter = exporter(&address.to_string(), &[]);
        exporter.metrics.note(&past("a", 1));
        exporter.export().await;
        assert!(*exporter.is_away.lock().await);
        let mut receive = serve(TcpListener::bind(address).await.unwrap());
        let spans = async {
            loop {
                exporter.export().await;
                while let Ok(received) = receive.try_recv() {
                    if let Received::Spans(spans) = received {
                        return spans;
                    }
                }
            }
        };
        let spans = timeout(Duration::from_secs(30), spans).await.unwrap();
        assert_eq!(spans.len(), 1);
        assert!(!*exporter.is_away.lock().await);
    }

    #[test]
    fn who_wants_no_generations_keeps_none_and_who_does_has_the_last_ones() {
        let ended = Ended::default();
        let note = |number| {
            let Effect::Past(past) = past("a", number) else {
                panic!()
            };
            ended.note(&past);
        };
        let numbers = |some: &[(SystemTime, Past)]| -> Vec<_> {
            some.iter().map(|(_, past)| past.generation.generation).collect()
        };
        note(1);
        assert!(ended.take().is_empty());
        ended.is_wanted.store(true, Ordering::Relaxed);
        (1..=MAX_WAITING as u64 + 2).for_each(note);
        let first = ended.take();
        assert_eq!(numbers(&first), (3..3 + MAX_SPANS as u64).collect::<Vec<_>>());
        note(5000);
        ended.give_back(first);
        assert_eq!(ended.waiting().len(), MAX_WAITING);
        assert_eq!(ended.take()[0].1.generation.generation, 4, "the oldest made room");
    }

    #[test]
    fn variables_that_cannot_be_used_are_named_and_headers_are_not_shown() {
        assert!(collector(&[]).unwrap().is_none());
        assert!(collector(&[(ENDPOINT, "")]).unwrap().is_none());
        let disabled = [(ENDPOINT, "http://a:4317"), ("OTEL_SDK_DISABLED", "True")];
        assert!(collector(&disabled).unwrap().is_none());
        let refused = |name, value| {
            let error = collector(&[(ENDPOINT, "http://a:4317"), (name, value)]).unwrap_err();
            error.to_string()
        };
        let expected = "OTEL_METRIC_EXPORT_INTERVAL is `0`: expected milliseconds, 1 or more";
        assert_eq!(refused(INTERVAL, "0"), expected);
        assert!(refused(TIMEOUT, "10s").contains("OTEL_EXPORTER_OTLP_TIMEOUT is `10s`"));
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
