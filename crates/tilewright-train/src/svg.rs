//! The loss curve as a small SVG: no script, no fonts of its own, readable on light and dark pages.

use std::fmt::Write;

/// What to draw.
#[derive(Clone, Debug)]
pub struct LossCurve<'a> {
    /// Shown above the plot.
    pub title: &'a str,
    /// Training loss by step.
    pub train: &'a [(usize, f64)],
    /// Validation loss by step.
    pub val: &'a [(usize, f64)],
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 54.0;
/// More points than this cannot be told apart at this width.
const MAX_POINTS: usize = 1500;

impl LossCurve<'_> {
    /// The document.
    pub fn render(&self) -> String {
        let finite = |points: &[(usize, f64)]| -> Vec<(usize, f64)> {
            points.iter().copied().filter(|(_, y)| y.is_finite()).collect()
        };
        let (train, val) = (thin(&finite(self.train)), finite(self.val));
        let all = || train.iter().chain(&val);
        let x_max = all().map(|p| p.0).max().unwrap_or(0).max(1) as f64;
        let low = all().map(|p| p.1).fold(f64::INFINITY, f64::min);
        let high = all().map(|p| p.1).fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = if low.is_finite() { (low, high) } else { (0.0, 1.0) };
        let y_step = nice_step((high - low).max(1e-3) / 6.0);
        let (y_min, y_max) = ((low / y_step).floor() * y_step, (high / y_step).ceil() * y_step);
        let y_max = if y_max > y_min { y_max } else { y_min + y_step };
        let x_step = nice_step(x_max / 8.0).max(1.0);
        let x = |step: f64| LEFT + step / x_max * (WIDTH - LEFT - RIGHT);
        let y = |loss: f64| TOP + (y_max - loss) / (y_max - y_min) * (HEIGHT - TOP - BOTTOM);

        let mut s = String::new();
        // The colours hold at least 4.5:1 on white and on the dark ground; the ground itself follows the reader's scheme.
        let _ = write!(
            s,
            r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{}">
<style>
.ground{{fill:#ffffff}}.ink{{fill:#24292f}}.grid{{stroke:#d0d7de}}.axis{{stroke:#57606a}}.train{{stroke:#8250df}}.val{{stroke:#bc4c00}}.val-dot{{fill:#bc4c00}}
@media (prefers-color-scheme: dark){{.ground{{fill:#0d1117}}.ink{{fill:#e6edf3}}.grid{{stroke:#30363d}}.axis{{stroke:#8b949e}}.train{{stroke:#bc8cff}}.val{{stroke:#ffa657}}.val-dot{{fill:#ffa657}}}}
text{{font-family:system-ui,sans-serif;font-size:13px}}
</style>
<rect class="ground" width="{WIDTH}" height="{HEIGHT}" rx="6"/>
<text class="ink" x="{LEFT}" y="26" style="font-weight:600">{}</text>
"##,
            escape(self.title),
            escape(self.title)
        );
        let digits = if y_step >= 1.0 { 0 } else { (-y_step.log10()).ceil() as usize };
        for i in 0..=((y_max - y_min) / y_step).round() as usize {
            let value = y_min + i as f64 * y_step;
            let at = y(value);
            let _ = writeln!(
                s,
                r#"<line class="grid" x1="{LEFT}" x2="{:.1}" y1="{at:.1}" y2="{at:.1}"/><text class="ink" x="{:.1}" y="{:.1}" text-anchor="end">{value:.digits$}</text>"#,
                WIDTH - RIGHT,
                LEFT - 8.0,
                at + 4.5,
            );
        }
        for i in 0..=(x_max / x_step) as usize {
            let value = i as f64 * x_step;
            let _ = writeln!(
                s,
                r#"<text class="ink" x="{:.1}" y="{:.1}" text-anchor="middle">{value:.0}</text>"#,
                x(value),
                HEIGHT - BOTTOM + 18.0
            );
        }
        let base = HEIGHT - BOTTOM;
        let _ = writeln!(
            s,
            r#"<line class="axis" x1="{LEFT}" x2="{:.1}" y1="{base}" y2="{base}"/><line class="axis" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{base}"/>"#,
            WIDTH - RIGHT
        );
        let _ = writeln!(
            s,
            r#"<text class="ink" x="{:.1}" y="{:.1}" text-anchor="middle">step</text><text class="ink" transform="translate(18 {:.1}) rotate(-90)" text-anchor="middle">loss (nats per token)</text>"#,
            (LEFT + WIDTH - RIGHT) / 2.0,
            HEIGHT - 12.0,
            (TOP + base) / 2.0
        );
        for (class, width, points) in [("train", 1.2, &train), ("val", 2.2, &val)] {
            if points.is_empty() {
                continue;
            }
            let _ = write!(s, r#"<polyline class="{class}" fill="none" stroke-width="{width}" points=""#);
            for (step, loss) in points {
                let _ = write!(s, "{:.1},{:.1} ", x(*step as f64), y(*loss));
            }
            s.push_str("\"/>\n");
        }
        // A single validation has no line; the dots show it.
        for (step, loss) in &val {
            let _ = writeln!(s, r#"<circle class="val-dot" cx="{:.1}" cy="{:.1}" r="3"/>"#, x(*step as f64), y(*loss));
        }
        let legend = WIDTH - RIGHT - 170.0;
        for (i, class) in ["train", "val"].into_iter().enumerate() {
            let at = legend + 85.0 * i as f64;
            let label = ["train", "validation"][i];
            let _ = writeln!(
                s,
                r#"<line class="{class}" stroke-width="3" x1="{at:.1}" x2="{:.1}" y1="22" y2="22"/><text class="ink" x="{:.1}" y="26">{label}</text>"#,
                at + 20.0,
                at + 26.0
            );
        }
        s.push_str("</svg>\n");
        s
    }
}

/// Means of equal runs of points, so that long runs stay small files.
fn thin(points: &[(usize, f64)]) -> Vec<(usize, f64)> {
    let size = points.len().div_ceil(MAX_POINTS).max(1);
    let mean = |run: &[(usize, f64)]| run.iter().map(|p| p.1).sum::<f64>() / run.len() as f64;
    points.chunks(size).map(|run| (run[run.len() / 2].0, mean(run))).collect()
}

/// 1, 2 or 5 times a power of ten, at least `raw`.
fn nice_step(raw: f64) -> f64 {
    let power = 10f64.powf(raw.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= raw * 0.999_999).unwrap_or(10.0 * power)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every tag closes, attributes are quoted, and no number is NaN or infinite.
    fn assert_well_formed(svg: &str) {
        let mut open: Vec<&str> = Vec::new();
        let mut rest = svg;
        while let Some(start) = rest.find('<') {
            let end = start + rest[start..].find('>').expect("a tag ends");
            let tag = &rest[start + 1..end];
            assert!(tag.matches('"').count().is_multiple_of(2), "quotes in <{tag}>");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name));
            } else if !tag.ends_with('/') {
                open.push(tag.split_whitespace().next().unwrap());
            }
            rest = &rest[end + 1..];
        }
        assert!(open.is_empty(), "left open: {open:?}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn a_usual_run_has_axes_labels_both_curves_and_a_dark_scheme() {
        let train: Vec<_> = (0..500).map(|i| (i, 6.0 * (-(i as f64) / 200.0).exp() + 1.5)).collect();
        let val: Vec<_> = (0..=10).map(|i| (50 * i, 5.0 - 0.3 * i as f64)).collect();
        let svg = LossCurve { title: "austen <d4> & \"co\"", train: &train, val: &val }.render();
        assert_well_formed(&svg);
        for want in
            [">step<", "loss (nats per token)", "prefers-color-scheme: dark", ">train<", ">validation<", "&lt;d4&gt;"]
        {
            assert!(svg.contains(want), "{want} missing");
        }
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert_eq!(svg.matches("<circle").count(), 11);
    }

    #[test]
    fn degenerate_runs_are_well_formed_too() {
        for (train, val) in [
            (vec![], vec![]),
            (vec![(0, 3.0)], vec![]),
            (vec![], vec![(0, 3.0)]),
            (vec![(0, 2.0), (1, 2.0)], vec![]),
            (vec![(0, f64::NAN), (1, f64::INFINITY), (2, 1.0)], vec![]),
            (vec![(1_000_000, 1e9), (2_000_000, 1e-9)], vec![]),
        ] {
            assert_well_formed(&LossCurve { title: "", train: &train, val: &val }.render());
        }
    }

    #[test]
    fn a_long_run_is_thinned_to_a_small_file() {
        let train: Vec<_> = (0..1_000_000).map(|i| (i, 3.0)).collect();
        let svg = LossCurve { title: "long", train: &train, val: &[] }.render();
        assert!(svg.len() < 60_000, "{} bytes", svg.len());
    }
}
