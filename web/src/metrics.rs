//! The overview for Prometheus, in the OpenMetrics text format.
//!
//! Gauges of one moment: nothing is counted here, so several servers of one cluster say the same.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use weft_cluster::{HostState, HostView, Overview, RunView, WorkKind};

/// The type of the answer.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

const MIB: f64 = (1 << 20) as f64;

type Labels = Vec<(&'static str, String)>;
type Gauges = Family<Labels, Gauge<f64, AtomicU64>>;

/// A gauge with what it is for each of `values`.
fn gauges(
    registry: &mut Registry,
    (name, unit, help): (&str, Option<Unit>, &str),
    values: impl IntoIterator<Item = (Labels, f64)>,
) {
    let family = Gauges::default();
    for (labels, value) in values {
        family.get_or_create(&labels).set(value);
    }
    match unit {
        Some(unit) => registry.register_with_unit(name, help, unit, family),
        None => registry.register(name, help, family),
    }
}

fn flag(is: bool) -> f64 {
    f64::from(u8::from(is))
}

/// `log`: the number of the newest record of the log.
pub(crate) fn render(overview: &Overview, log: u64) -> String {
    let mut registry = Registry::with_prefix("weft");
    of_cluster(&mut registry, overview, log);
    of_hosts(&mut registry, overview);
    of_work(&mut registry, overview);
    let mut text = String::new();
    // A string takes everything.
    let _ = encode(&mut text, &registry);
    text
}

fn of_cluster(registry: &mut Registry, overview: &Overview, log: u64) {
    let one = |value: f64| [(Vec::new(), value)];
    let cluster = vec![("cluster", overview.cluster.clone())];
    let info = ("cluster_info", None, "The cluster that this is about");
    gauges(registry, info, [(cluster, 1.0)]);
    let leader = ("cluster_has_leader", None, "Whether a host decides");
    gauges(registry, leader, one(flag(overview.leader.is_some())));
    let hands_off = (
        "cluster_hands_off",
        None,
        "Whether the cluster moves nothing by itself",
    );
    gauges(registry, hands_off, one(flag(overview.hands_off)));
    let records = (
        "cluster_log_records",
        None,
        "Records that the log has had so far",
    );
    gauges(registry, records, one(log as f64));
    let damaged = (
        "cluster_damaged_records",
        None,
        "Records of work that cannot be read",
    );
    gauges(registry, damaged, one(overview.damaged.len() as f64));
    let largest = (
        "cluster_largest_block_cores",
        None,
        "The most free cores on one host",
    );
    gauges(registry, largest, one(f64::from(overview.largest_block())));
}

fn of_hosts(registry: &mut Registry, overview: &Overview) {
    let mut of_each = |what, value: &dyn Fn(&HostView) -> Option<f64>| {
        let labels = |host: &HostView| vec![("host", host.name.clone())];
        let hosts = overview.hosts.iter();
        gauges(
            registry,
            what,
            hosts.filter_map(|host| Some((labels(host), value(host)?))),
        );
    };
    of_each(
        ("host_up", None, "Whether the host's daemon reports"),
        &|host| Some(flag(host.alive)),
    );
    of_each(
        (
            "host_takes_work",
            None,
            "Whether new work comes to the host",
        ),
        &|host| Some(flag(host.state == HostState::Lends)),
    );
    of_each(
        (
            "host_failing",
            None,
            "Whether the host is expected to fail, so that everything leaves it",
        ),
        &|host| Some(flag(host.trouble.is_some())),
    );
    of_each(
        ("host_cores", None, "Cores that the host offers"),
        &|host| Some(f64::from(host.cores)),
    );
    of_each(("host_cores_free", None, "Cores that are free"), &|host| {
        Some(f64::from(host.cores_free))
    });
    of_each(
        (
            "host_cores_stranded",
            None,
            "Free cores without free memory beside them",
        ),
        &|host| Some(f64::from(host.cores_stranded)),
    );
    let bytes = || Some(Unit::Bytes);
    of_each(
        ("host_memory", bytes(), "Memory that the host offers"),
        &|host| Some(host.memory_mib as f64 * MIB),
    );
    of_each(
        ("host_memory_free", bytes(), "Offered memory that is free"),
        &|host| Some(host.memory_free_mib as f64 * MIB),
    );
    of_each(
        ("host_lends", bytes(), "Memory that the host lends"),
        &|host| Some(host.report.as_ref()?.lends_bytes as f64),
    );
    of_each(
        ("host_lent", bytes(), "Lent memory that is in use"),
        &|host| Some(host.report.as_ref()?.lent_bytes as f64),
    );
    of_each(
        ("host_slices", None, "Slices that run on the host"),
        &|host| Some(f64::from(host.report.as_ref()?.slices)),
    );
    of_each(
        (
            "host_load1",
            None,
            "Processes that ran or wanted to, in the mean of the last minute",
        ),
        &|host| Some(host.report.as_ref()?.load),
    );
}

fn of_work(registry: &mut Registry, overview: &Overview) {
    let kinds = [WorkKind::Program, WorkKind::Machine];
    let of_kind = |kind: WorkKind| vec![("kind", kind.name().to_owned())];
    let runs = |kind| overview.runs.iter().filter(move |run| run.kind == kind);
    let waits = |kind| overview.waits.iter().filter(move |wait| wait.kind == kind);
    gauges(
        registry,
        ("work_running", None, "Programs and machines that run"),
        kinds.map(|kind| (of_kind(kind), runs(kind).count() as f64)),
    );
    gauges(
        registry,
        ("work_waiting", None, "Requests that wait for room"),
        kinds.map(|kind| (of_kind(kind), waits(kind).count() as f64)),
    );
    let mut of_each = |what, value: &dyn Fn(&RunView) -> f64| {
        let labels = |run: &RunView| vec![("name", run.name.clone())];
        let runs = overview.runs.iter();
        gauges(registry, what, runs.map(|run| (labels(run), value(run))));
    };
    of_each(
        ("work_hosts", None, "Hosts over which it is spread"),
        &|run| run.parts.len() as f64,
    );
    of_each(
        (
            "work_slow_down_ratio",
            None,
            "How many times as long it needs as on one host, by the scheduler's costs",
        ),
        &|run| run.slow_down,
    );
    of_each(
        ("work_moves", None, "Whether a move of it is under way"),
        &|run| flag(run.moving.is_some()),
    );
    of_each(
        ("work_move_failed", None, "Whether its last move failed"),
        &|run| flag(run.failure.is_some()),
    );
    of_each(("work_agent_up", None, "Whether its agent lives"), &|run| {
        flag(run.agent)
    });
}
