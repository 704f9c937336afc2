//! Counts of what the server did, in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Only rises.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// The count.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Observations in buckets.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    counts: Vec<AtomicU64>,
    /// Bits of an f64.
    sum: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Histogram { bounds, counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(), sum: AtomicU64::new(0) }
    }

    /// Counts a value.
    pub fn observe(&self, value: f64) {
        let at = self.bounds.iter().position(|b| value <= *b).unwrap_or(self.bounds.len());
        self.counts[at].fetch_add(1, Ordering::Relaxed);
        let add = |bits| Some((f64::from_bits(bits) + value).to_bits());
        let _ = self.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// How many values there were.
    pub fn count(&self) -> u64 {
        self.counts.iter().map(|c| c.load(Ordering::Relaxed)).sum()
    }

    fn write(&self, out: &mut String, name: &str, help: &str) {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        let mut total = 0;
        for (bound, count) in self.bounds.iter().zip(&self.counts) {
            total += count.load(Ordering::Relaxed);
            let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {total}");
        }
        total += self.counts[self.bounds.len()].load(Ordering::Relaxed);
        let sum = f64::from_bits(self.sum.load(Ordering::Relaxed));
        let _ = writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {total}\n{name}_sum {sum}\n{name}_count {total}");
    }
}

const SECONDS: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
const TOKENS: &[f64] = &[64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];

/// All of them.
#[derive(Debug)]
pub struct Metrics {
    /// Requests by route and status.
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    /// Faults by kind.
    faults: Mutex<BTreeMap<&'static str, u64>>,
    /// From the last byte of a request to its answer.
    pub request_seconds: Histogram,
    /// One pack on the device.
    pub pack_seconds: Histogram,
    /// Tokens of a pack.
    pub pack_tokens: Histogram,
    /// Rows scored.
    pub rows: Counter,
    /// Tokens scored.
    pub tokens: Counter,
    /// Passes dropped because nobody waited for them any more.
    pub abandoned: Counter,
    /// Requests refused because they would not have been answered in their time.
    pub late: Counter,
    /// Checkpoints loaded.
    pub loads: Counter,
    /// Checkpoints loaded anew because their files changed or somebody asked.
    pub reloads: Counter,
    /// Checkpoints that did not load.
    pub load_failures: Counter,
    /// Checkpoints unloaded to make room or because they were idle.
    pub unloads: Counter,
    /// Lines of the audit file that could not be written.
    pub audit_failures: Counter,
    /// Connections that were accepted.
    pub connections: Counter,
    /// Idle connections that were closed to make room.
    pub evicted: Counter,
    /// Connections that were refused.
    pub refused: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics {
            requests: Mutex::default(),
            faults: Mutex::default(),
            request_seconds: Histogram::new(SECONDS),
            pack_seconds: Histogram::new(SECONDS),
            pack_tokens: Histogram::new(TOKENS),
            rows: Counter::default(),
            tokens: Counter::default(),
            abandoned: Counter::default(),
            late: Counter::default(),
            loads: Counter::default(),
            reloads: Counter::default(),
            load_failures: Counter::default(),
            unloads: Counter::default(),
            audit_failures: Counter::default(),
            connections: Counter::default(),
            evicted: Counter::default(),
            refused: Counter::default(),
        }
    }
}

impl Metrics {
    /// Counts a response. `route` is one of ours, never what a client wrote: labels must stay few.
    pub fn request(&self, route: &'static str, status: u16) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        *requests.entry((route, status)).or_default() += 1;
    }

    /// Counts a fault.
    pub fn fault(&self, kind: &'static str) {
        *self.faults.lock().unwrap_or_else(PoisonError::into_inner).entry(kind).or_default() += 1;
    }

    /// All of them as text, and gauges of the moment.
    pub fn text(&self, gauges: &[(&str, &str, f64)]) -> String {
        let mut out = String::new();
        let head = |out: &mut String, name: &str, help: &str, kind: &str| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        };
        head(&mut out, "tilewright_requests_total", "Responses by route and status.", "counter");
        for ((route, status), n) in self.requests.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = writeln!(out, "tilewright_requests_total{{route=\"{route}\",status=\"{status}\"}} {n}");
        }
        head(&mut out, "tilewright_faults_total", "Requests that were not answered, by reason.", "counter");
        for (kind, n) in self.faults.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = writeln!(out, "tilewright_faults_total{{kind=\"{kind}\"}} {n}");
        }
        for (name, help, counter) in [
            ("rows_total", "Rows scored.", &self.rows),
            ("tokens_total", "Tokens scored.", &self.tokens),
            ("abandoned_total", "Passes dropped because nobody waited for them.", &self.abandoned),
            ("late_total", "Requests refused because they would not have been answered in their time.", &self.late),
            ("model_loads_total", "Checkpoints loaded.", &self.loads),
            ("model_reloads_total", "Checkpoints loaded anew.", &self.reloads),
            ("model_load_failures_total", "Checkpoints that did not load.", &self.load_failures),
            ("model_unloads_total", "Checkpoints unloaded.", &self.unloads),
            ("audit_failures_total", "Lines of the audit file that could not be written.", &self.audit_failures),
            ("connections_total", "Connections accepted.", &self.connections),
            ("connections_evicted_total", "Idle connections closed to make room.", &self.evicted),
            ("connections_refused_total", "Connections refused.", &self.refused),
        ] {
            let name = format!("tilewright_{name}");
            head(&mut out, &name, help, "counter");
            let _ = writeln!(out, "{name} {}", counter.get());
        }
        for (name, help, value) in gauges {
            let name = format!("tilewright_{name}");
            head(&mut out, &name, help, "gauge");
            let _ = writeln!(out, "{name} {value}");
        }
        let seconds = "From a request's last byte to its answer.";
        self.request_seconds.write(&mut out, "tilewright_request_seconds", seconds);
        self.pack_seconds.write(&mut out, "tilewright_pack_seconds", "One pack on the device.");
        self.pack_tokens.write(&mut out, "tilewright_pack_tokens", "Tokens of a pack.");
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_what_prometheus_reads() {
        let metrics = Metrics::default();
        metrics.request("/v1/systemone", 200);
        metrics.request("/v1/systemone", 200);
        metrics.fault("overloaded_error");
        metrics.rows.add(7);
        let text = metrics.text(&[("queue_tokens", "Tokens that wait.", 3.0)]);
        for line in [
            "tilewright_requests_total{route=\"/v1/systemone\",status=\"200\"} 2",
            "tilewright_faults_total{kind=\"overloaded_error\"} 1",
            "tilewright_rows_total 7",
            "# TYPE tilewright_queue_tokens gauge",
            "tilewright_queue_tokens 3",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        let names: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("# TYPE ")).collect();
        let mut unique = names.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), names.len(), "every name has one type");
    }

    #[test]
    fn buckets_of_a_histogram_add_up() {
        let histogram = Histogram::new(&[1.0, 2.0]);
        [0.5, 1.0, 1.5, 9.0].into_iter().for_each(|v| histogram.observe(v));
        let mut text = String::new();
        histogram.write(&mut text, "h", "help");
        assert!(
            text.ends_with(
                "h_bucket{le=\"1\"} 2\nh_bucket{le=\"2\"} 3\nh_bucket{le=\"+Inf\"} 4\nh_sum 12\nh_count 4\n"
            )
        );
    }
}
