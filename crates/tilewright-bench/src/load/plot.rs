//! Curves as SVG text, in the colours of the page.

use std::fmt::Write;

use crate::report::plot::{WIDTH, escape, number, open, ratio_ticks, ticks};

/// An axis.
#[derive(Debug, Clone, Default)]
pub struct Axis {
    /// Beside it.
    pub label: String,
    /// Whether equal steps are equal factors.
    pub log: bool,
    /// Instead of round numbers.
    pub ticks: Vec<(f64, String)>,
}

/// A curve.
#[derive(Debug, Clone)]
pub struct Curve {
    /// Number of the colour.
    pub colour: usize,
    /// In the legend.
    pub name: String,
    /// From left to right.
    pub points: Vec<(f64, f64)>,
    /// Whether each point has a dot.
    pub dots: bool,
}

const HEIGHT: f64 = 220.0;
const LEFT: f64 = 48.0;
const RIGHT: f64 = WIDTH - 10.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = HEIGHT - 34.0;

/// Where a value lies between two ends, from 0 to 1.
struct Scale {
    low: f64,
    high: f64,
    log: bool,
}

impl Scale {
    fn new(values: impl Iterator<Item = f64>, axis: &Axis) -> Scale {
        let usable = values.filter(|v| v.is_finite() && (!axis.log || *v > 0.0));
        let (low, high) = usable.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        let (low, high) = match (low.is_finite(), axis.log) {
            (false, _) => (1.0, 10.0),
            (true, true) => (low / 1.1, (high * 1.1).max(low * 1.3)),
            (true, false) => (low.min(0.0), if high > low.min(0.0) { high * 1.05 } else { low.min(0.0) + 1.0 }),
        };
        Scale { low, high, log: axis.log }
    }

    fn at(&self, v: f64) -> f64 {
        let part = if self.log {
            (v.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (v - self.low) / (self.high - self.low)
        };
        part.clamp(0.0, 1.0)
    }

    fn ticks(&self, axis: &Axis) -> Vec<(f64, String)> {
        if !axis.ticks.is_empty() {
            return axis.ticks.iter().filter(|t| (self.low..=self.high).contains(&t.0)).cloned().collect();
        }
        let found = if self.log { ratio_ticks(self.low, self.high) } else { ticks(self.low, self.high, 5) };
        found.into_iter().map(|t| (t, number(t))).collect()
    }
}

/// Some curves over common axes; empty where there is nothing to draw.
pub fn curves(title: &str, x: &Axis, y: &Axis, curves: &[Curve]) -> String {
    if curves.iter().all(|c| c.points.is_empty()) {
        return String::new();
    }
    let all = || curves.iter().flat_map(|c| c.points.iter());
    let (across, up) = (Scale::new(all().map(|p| p.0), x), Scale::new(all().map(|p| p.1), y));
    let place = |p: &(f64, f64)| (LEFT + across.at(p.0) * (RIGHT - LEFT), BOTTOM - up.at(p.1) * (BOTTOM - TOP));
    let mut svg = open(title, HEIGHT);
    for (tick, label) in up.ticks(y) {
        let at = place(&(across.low, tick)).1;
        let _ = write!(svg, r#"<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{at:.1}" y2="{at:.1}"/>"#);
        let _ = write!(
            svg,
            r#"<text class="tick" x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
            LEFT - 5.0,
            at + 3.5,
            escape(&label)
        );
    }
    // Labels of ticks must not run into each other; the grid may be closer.
    let mut last = f64::NEG_INFINITY;
    for (tick, label) in across.ticks(x) {
        let at = place(&(tick, up.low)).0;
        let _ = write!(svg, r#"<line class="grid" x1="{at:.1}" x2="{at:.1}" y1="{TOP}" y2="{BOTTOM}"/>"#);
        if at - last > 26.0 {
            last = at;
            let middle = if at > RIGHT - 12.0 { "end" } else { "middle" };
            let _ = write!(
                svg,
                r#"<text class="tick" x="{at:.1}" y="{:.1}" text-anchor="{middle}">{}</text>"#,
                BOTTOM + 13.0,
                escape(&label)
            );
        }
    }
    let _ = write!(
        svg,
        r#"<text class="tick" x="{RIGHT}" y="{:.1}" text-anchor="end">{}; {} upwards</text>"#,
        HEIGHT - 4.0,
        escape(&x.label),
        escape(&y.label)
    );
    for curve in curves {
        let places: Vec<(f64, f64)> = curve.points.iter().map(place).collect();
        let line: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = write!(svg, r#"<polyline class="curve l{}" points="{}"/>"#, curve.colour % 6, line.join(" "));
        for (x, y) in places.iter().filter(|_| curve.dots) {
            let _ = write!(svg, r#"<circle class="s{}" cx="{x:.1}" cy="{y:.1}" r="3"/>"#, curve.colour % 6);
        }
    }
    svg + "</svg>"
}

/// The names of the curves in their colours.
pub fn legend(curves: &[Curve]) -> String {
    let item = |c: &Curve| format!("<span class=\"key k{}\">{}</span>", c.colour % 6, escape(&c.name));
    let items: Vec<String> = curves.iter().filter(|c| !c.points.is_empty()).map(item).collect();
    format!("<p class=\"legend\">{}</p>", items.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: Vec<(f64, f64)>) -> Curve {
        Curve { colour: 0, name: "<a>".into(), points, dots: true }
    }

    #[test]
    fn every_point_lies_inside_the_drawing() {
        let log = Axis { label: "x".into(), log: true, ticks: Vec::new() };
        for points in [vec![(1.0, 5.0)], vec![(1.0, 0.0), (1e6, 1e-9), (2.0, 1e9)], vec![(3.0, 3.0), (3.0, 3.0)]] {
            for axis in [&log, &Axis::default()] {
                let svg = curves("t", axis, axis, &[curve(points.clone())]);
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
                for part in svg.split("cx=\"").skip(1) {
                    let x: f64 = part.split('"').next().unwrap().parse().unwrap();
                    assert!((LEFT..=RIGHT).contains(&x), "{x}");
                }
            }
        }
    }

    #[test]
    fn nothing_is_drawn_of_nothing_and_names_are_escaped() {
        assert_eq!(curves("t", &Axis::default(), &Axis::default(), &[curve(Vec::new())]), "");
        assert!(legend(&[curve(vec![(1.0, 1.0)])]).contains("&lt;a&gt;"));
    }

    #[test]
    fn given_ticks_outside_the_scale_are_left_out() {
        let axis = Axis { ticks: vec![(0.0, "zero".into()), (50.0, "far".into())], ..Axis::default() };
        let svg = curves("t", &axis, &Axis::default(), &[curve(vec![(0.0, 1.0), (10.0, 2.0)])]);
        assert!(svg.contains("zero") && !svg.contains("far"));
    }
}
