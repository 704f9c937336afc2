//! The reliability diagram as a small SVG: accuracy by confidence, one panel a group. No script, readable on light and dark pages.

use std::fmt::Write;

use super::metrics::Bin;

const PANEL: f64 = 300.0;
const PLOT: f64 = 232.0;
const LEFT: f64 = 52.0;
const TOP: f64 = 56.0;
const HEIGHT: f64 = 404.0;
/// Below the plot: how many rows each bin has.
const COUNTS_TOP: f64 = TOP + PLOT + 22.0;
const COUNTS: f64 = 44.0;

/// Draws one panel for each group of bins. On the diagonal, the confidence is what is right that often.
pub fn reliability_svg(title: &str, panels: &[(&str, &[Bin])]) -> String {
    let width = PANEL * panels.len().max(1) as f64 + 12.0;
    let mut s = String::new();
    // The colours hold at least 4.5:1 on white and on the dark ground.
    let _ = write!(
        s,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{0}">
<style>
.ground{{fill:#ffffff}}.ink{{fill:#24292f}}.grid{{stroke:#d0d7de}}.axis{{stroke:#57606a}}.line{{stroke:#8250df}}.dot{{fill:#8250df}}.bar{{fill:#8c959f}}
@media (prefers-color-scheme: dark){{.ground{{fill:#0d1117}}.ink{{fill:#e6edf3}}.grid{{stroke:#30363d}}.axis{{stroke:#8b949e}}.line{{stroke:#bc8cff}}.dot{{fill:#bc8cff}}.bar{{fill:#6e7681}}}}
text{{font-family:system-ui,sans-serif;font-size:12px}}
</style>
<rect class="ground" width="{width}" height="{HEIGHT}" rx="6"/>
<text class="ink" x="{LEFT}" y="24" style="font-weight:600;font-size:14px">{0}</text>
"##,
        escape(title)
    );
    for (i, (name, bins)) in panels.iter().enumerate() {
        let _ = writeln!(s, r#"<g transform="translate({:.1} 0)">"#, i as f64 * PANEL);
        panel(&mut s, name, bins);
        s.push_str("</g>\n");
    }
    s.push_str("</svg>\n");
    s
}

fn panel(s: &mut String, name: &str, bins: &[Bin]) {
    let x = |v: f64| LEFT + v.clamp(0.0, 1.0) * PLOT;
    let y = |v: f64| TOP + (1.0 - v.clamp(0.0, 1.0)) * PLOT;
    let rows: usize = bins.iter().map(|b| b.rows).sum();
    let _ = writeln!(s, r#"<text class="ink" x="{LEFT}" y="{:.1}">{}: {rows} rows</text>"#, TOP - 12.0, escape(name));
    for i in 0..=4 {
        let v = f64::from(i) / 4.0;
        let _ = writeln!(
            s,
            r#"<line class="grid" x1="{LEFT}" x2="{:.1}" y1="{at:.1}" y2="{at:.1}"/><text class="ink" x="{:.1}" y="{:.1}" text-anchor="end">{v}</text><text class="ink" x="{:.1}" y="{:.1}" text-anchor="middle">{v}</text>"#,
            LEFT + PLOT,
            LEFT - 6.0,
            y(v) + 4.0,
            x(v),
            TOP + PLOT + 16.0,
            at = y(v),
        );
    }
    let _ = writeln!(
        s,
        r#"<line class="axis" stroke-dasharray="4 4" x1="{LEFT}" y1="{:.1}" x2="{:.1}" y2="{TOP}"/><line class="axis" x1="{LEFT}" x2="{:.1}" y1="{:.1}" y2="{:.1}"/><line class="axis" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{:.1}"/>"#,
        TOP + PLOT,
        LEFT + PLOT,
        LEFT + PLOT,
        TOP + PLOT,
        TOP + PLOT,
        TOP + PLOT,
    );
    let filled = || bins.iter().filter(|b| b.rows > 0);
    if filled().count() > 1 {
        s.push_str(r#"<polyline class="line" fill="none" stroke-width="2" points=""#);
        for bin in filled() {
            let _ = write!(s, "{:.1},{:.1} ", x(bin.confidence), y(bin.accuracy));
        }
        s.push_str("\"/>\n");
    }
    for bin in filled() {
        let _ = writeln!(
            s,
            r#"<circle class="dot" cx="{:.1}" cy="{:.1}" r="3.5"><title>{} rows: confidence {:.3}, right {:.3}</title></circle>"#,
            x(bin.confidence),
            y(bin.accuracy),
            bin.rows,
            bin.confidence,
            bin.accuracy
        );
    }
    let most = bins.iter().map(|b| b.rows).max().unwrap_or(0).max(1) as f64;
    let each = PLOT / bins.len().max(1) as f64;
    for (i, bin) in bins.iter().enumerate().filter(|(_, b)| b.rows > 0) {
        let height = COUNTS * bin.rows as f64 / most;
        let _ = writeln!(
            s,
            r#"<rect class="bar" x="{:.1}" y="{:.1}" width="{:.1}" height="{height:.1}"/>"#,
            LEFT + i as f64 * each + 1.0,
            COUNTS_TOP + COUNTS - height,
            each - 2.0
        );
    }
    let _ = writeln!(
        s,
        r#"<text class="ink" x="{0:.1}" y="{1:.1}" text-anchor="middle">confidence (bars: rows)</text><text class="ink" transform="translate(16 {2:.1}) rotate(-90)" text-anchor="middle">share right</text>"#,
        LEFT + PLOT / 2.0,
        COUNTS_TOP + COUNTS + 20.0,
        TOP + PLOT / 2.0
    );
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
    fn each_group_is_a_panel_with_a_dot_and_a_bar_for_each_filled_bin() {
        let bins = [
            Bin { rows: 4, confidence: 0.3, accuracy: 0.25 },
            Bin::default(),
            Bin { rows: 9, confidence: 0.9, accuracy: 1.0 },
        ];
        let svg = reliability_svg("a <b> & \"c\"", &[("intent", &bins), ("all noul", &bins[..1])]);
        assert_well_formed(&svg);
        assert_eq!(svg.matches("<circle").count(), 3);
        assert_eq!(svg.matches("class=\"bar\"").count(), 3);
        assert_eq!(svg.matches("<polyline").count(), 1, "one bin makes no line");
        for want in ["intent: 13 rows", "all noul: 4 rows", "&lt;b&gt;", "prefers-color-scheme: dark"] {
            assert!(svg.contains(want), "{want}");
        }
    }

    #[test]
    fn nothing_to_draw_is_well_formed_too() {
        assert_well_formed(&reliability_svg("", &[]));
        assert_well_formed(&reliability_svg("", &[("x", &[])]));
        assert_well_formed(&reliability_svg("", &[("x", &[Bin::default(); 15])]));
    }
}
