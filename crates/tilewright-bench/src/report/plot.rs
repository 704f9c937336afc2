//! Plots as SVG text. Colours come from the page's CSS, so that one drawing serves light, dark and print.

use std::fmt::Write;

/// Text that is safe inside HTML and SVG.
pub fn escape(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c if c.is_control() && c != '\n' => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// A row of the forest plot.
pub struct Row {
    /// Above the interval.
    pub label: String,
    /// Beside the label, to the right.
    pub value: String,
    /// Low end, middle, high end.
    pub interval: [f64; 3],
    /// CSS class: what the verdict is.
    pub class: &'static str,
}

pub(crate) const WIDTH: f64 = 360.0;

/// Round numbers for an axis from `low` to `high`, about `count` of them.
pub fn ticks(low: f64, high: f64, count: usize) -> Vec<f64> {
    let span = high - low;
    if !(span > 0.0 && span.is_finite()) || count == 0 {
        return vec![low];
    }
    let raw = span / count as f64;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|s| *s >= raw).unwrap_or(raw);
    let first = (low / step).ceil() as i64;
    (0..=2 * count as i64).map(|i| (first + i) as f64 * step).filter(|t| *t <= high + span * 1e-9).collect()
}

/// Round numbers for a logarithmic axis: as for a plain one while the span is small, then 1, 2 and 5 of each power of ten.
pub(crate) fn ratio_ticks(low: f64, high: f64) -> Vec<f64> {
    if high / low < 3.0 {
        return ticks(low, high, 5);
    }
    let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let parts: &[f64] = if high / low < 50.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let all = powers.flat_map(|p| parts.iter().map(move |m| m * 10f64.powi(p)));
    all.filter(|t| (low..=high).contains(t)).collect()
}

pub(crate) fn number(v: f64) -> String {
    let text = format!("{v:.4}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

/// Ratios with their intervals on a logarithmic axis; 1 is a line.
pub fn forest(title: &str, rows: &[Row]) -> String {
    let ends = rows.iter().flat_map(|r| r.interval).filter(|v| *v > 0.0 && v.is_finite());
    let (low, high) = ends.fold((1.0f64, 1.0f64), |(l, h), v| (l.min(v), h.max(v)));
    let margin = ((high / low).ln() * 0.06).max(0.01);
    let (low, high) = ((low.ln() - margin).exp(), (high.ln() + margin).exp());
    let (left, right) = (8.0, WIDTH - 8.0);
    let x = |v: f64| left + (v / low).ln() / (high / low).ln() * (right - left);
    let row_height = 38.0;
    let height = rows.len() as f64 * row_height + 34.0;
    let bottom = height - 24.0;
    let mut svg = open(title, height);
    for tick in ratio_ticks(low, high) {
        let at = x(tick);
        let _ = write!(svg, r#"<line class="grid" x1="{at:.1}" x2="{at:.1}" y1="4" y2="{bottom:.1}"/>"#);
        let _ = write!(
            svg,
            r#"<text class="tick" x="{at:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
            height - 8.0,
            number(tick)
        );
    }
    let one = x(1.0);
    let _ = write!(svg, r#"<line class="one" x1="{one:.1}" x2="{one:.1}" y1="4" y2="{bottom:.1}"/>"#);
    for (i, row) in rows.iter().enumerate() {
        let y = i as f64 * row_height + 16.0;
        let [a, m, b] = row.interval.map(x);
        let bar = y + 12.0;
        let _ = write!(svg, r#"<text x="{left}" y="{y:.1}">{}</text>"#, escape(&row.label));
        let _ = write!(
            svg,
            r#"<text class="value" x="{right}" y="{y:.1}" text-anchor="end">{}</text>"#,
            escape(&row.value)
        );
        let _ = write!(svg, r#"<line class="bar {}" x1="{a:.1}" x2="{b:.1}" y1="{bar:.1}" y2="{bar:.1}"/>"#, row.class);
        for end in [a, b] {
            let _ = write!(
                svg,
                r#"<line class="cap {}" x1="{end:.1}" x2="{end:.1}" y1="{:.1}" y2="{:.1}"/>"#,
                row.class,
                bar - 4.0,
                bar + 4.0
            );
        }
        let _ = write!(svg, r#"<circle class="dot {}" cx="{m:.1}" cy="{bar:.1}" r="4.5"/>"#, row.class);
    }
    svg + "</svg>"
}

/// A line of a plot over time.
pub struct Series {
    /// Number of the colour.
    pub colour: usize,
    /// Points.
    pub points: Vec<(f64, f64)>,
}

/// Samples over time as dots, one colour an arm. The axis ends at the 98th percentile's double, so that one burst does not flatten all; what lies
/// above is drawn at the upper edge as a hollow dot.
pub fn samples(title: &str, unit: &str, series: &[Series]) -> String {
    let height = 190.0;
    let (left, right, top, bottom) = (48.0, WIDTH - 8.0, 12.0, height - 30.0);
    let mut all: Vec<f64> = series.iter().flat_map(|s| s.points.iter().map(|p| p.1)).collect();
    all.sort_by(f64::total_cmp);
    let last = series.iter().flat_map(|s| s.points.iter().map(|p| p.0)).fold(0.0, f64::max).max(1e-9);
    let Some((least, most)) = all.first().zip(all.last()) else { return String::new() };
    let high = (2.0 * crate::stats::quantile(&all, 0.98)).min(*most);
    let margin = ((high - least) * 0.08).max(high * 0.01);
    let (low, high) = ((least - margin).max(0.0), high + margin);
    let x = |v: f64| left + v / last * (right - left);
    let y = |v: f64| bottom - (v - low) / (high - low) * (bottom - top);
    let mut svg = open(title, height);
    for tick in ticks(low, high, 4) {
        let at = y(tick);
        let _ = write!(svg, r#"<line class="grid" x1="{left}" x2="{right}" y1="{at:.1}" y2="{at:.1}"/>"#);
        let _ = write!(
            svg,
            r#"<text class="tick" x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
            left - 5.0,
            at + 3.5,
            number(tick)
        );
    }
    for tick in ticks(0.0, last, 4) {
        let _ = write!(
            svg,
            r#"<text class="tick" x="{:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
            x(tick),
            bottom + 14.0,
            number(tick)
        );
    }
    let _ = write!(
        svg,
        r#"<text class="tick" x="{right}" y="{:.1}" text-anchor="end">seconds into the run; {} upwards</text>"#,
        height - 3.0,
        escape(unit)
    );
    for s in series {
        for &(at, value) in &s.points {
            let hollow = if value > high { " over" } else { "" };
            let _ = write!(
                svg,
                r#"<circle class="s{}{hollow}" cx="{:.1}" cy="{:.1}" r="2.2"/>"#,
                s.colour,
                x(at),
                y(value.min(high))
            );
        }
    }
    svg + "</svg>"
}

/// Bars from a common zero, each in two parts: what was live before, and what came on top.
pub fn bars(title: &str, rows: &[(String, f64, f64, String)]) -> String {
    let most = rows.iter().map(|r| r.1 + r.2).fold(0.0, f64::max).max(1.0);
    let (left, right) = (8.0, WIDTH - 8.0);
    let height = rows.len() as f64 * 38.0 + 8.0;
    let mut svg = open(title, height);
    for (i, (label, base, top, value)) in rows.iter().enumerate() {
        let y = i as f64 * 38.0 + 16.0;
        let width = |v: f64| v / most * (right - left);
        let _ = write!(svg, r#"<text x="{left}" y="{y:.1}">{}</text>"#, escape(label));
        let _ = write!(svg, r#"<text class="value" x="{right}" y="{y:.1}" text-anchor="end">{}</text>"#, escape(value));
        let _ = write!(
            svg,
            r#"<rect class="base" x="{left}" y="{:.1}" width="{:.1}" height="10"/>"#,
            y + 6.0,
            width(*base)
        );
        let _ = write!(
            svg,
            r#"<rect class="top" x="{:.1}" y="{:.1}" width="{:.1}" height="10"/>"#,
            left + width(*base),
            y + 6.0,
            width(*top)
        );
    }
    svg + "</svg>"
}

pub(crate) fn open(title: &str, height: f64) -> String {
    let title = escape(title);
    format!(r#"<svg viewBox="0 0 {WIDTH} {height:.0}" role="img" aria-label="{title}"><title>{title}</title>"#)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks(0.0, 10.0, 5), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        let t = ticks(0.93, 1.31, 5);
        assert!(t.iter().all(|v| (0.93..=1.31).contains(v)) && t.contains(&1.0), "{t:?}");
        assert_eq!(ticks(1.0, 1.0, 5), [1.0]);
        assert_eq!(ticks(0.0, f64::INFINITY, 5).len(), 1);
    }

    #[test]
    fn a_wide_range_of_ratios_has_few_ticks() {
        assert_eq!(ratio_ticks(0.4, 6.0), [0.5, 1.0, 2.0, 5.0]);
        assert_eq!(ratio_ticks(0.02, 20.0), [0.1, 1.0, 10.0]);
        assert!(ratio_ticks(f64::MIN_POSITIVE, 1e300).len() < 1000);
    }

    #[test]
    fn names_cannot_break_out_of_the_drawing() {
        let row =
            Row { label: "<script>'\"&".into(), value: "a\u{0}b".into(), interval: [0.9, 1.0, 1.1], class: "same" };
        let svg = forest("x", &[row]);
        assert!(!svg.contains("<script") && svg.contains("&lt;script&gt;&#39;&quot;&amp;") && svg.contains("a b"));
    }

    #[test]
    fn a_burst_is_drawn_at_the_edge_and_not_left_out() {
        let points: Vec<(f64, f64)> = (0..100).map(|i| (f64::from(i), if i == 50 { 100.0 } else { 1.0 })).collect();
        let svg = samples("t", "ms", &[Series { colour: 0, points }]);
        assert_eq!(svg.matches("<circle").count(), 100);
        assert_eq!(svg.matches("over").count(), 1);
    }
}
