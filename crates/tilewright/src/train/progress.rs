//! What a training run shows: a bar on a terminal, llm.c's lines otherwise.

use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tilewright_train::config::{Data, TrainConfig};
use tilewright_train::eval::Score;
use tilewright_train::log::{scientific, z_score};
use tilewright_train::run::{Observer, Started, StepReport, Summary};

/// Watches a run.
pub struct Progress {
    use_bar: bool,
    bar: Option<ProgressBar>,
}

/// llm.c's line for a step.
pub fn step_line(r: &StepReport) -> String {
    let utilisation = r.utilisation.map_or_else(|| "n/a MFU".into(), |u| format!("{:.1}% MFU", 100.0 * u));
    let skipped = if r.skipped { " | update skipped" } else { "" };
    format!(
        "step {:4}/{} | loss {:7.6} {}| norm {:6.4} {}| lr {} | {:.2} ms | {utilisation} | {:.0} tok/s{skipped}",
        r.step + 1,
        r.steps,
        r.loss,
        z_score(r.loss_z),
        r.norm,
        z_score(r.norm_z),
        scientific(r.lr),
        r.ms,
        r.tokens_per_second,
    )
}

impl Progress {
    /// With a bar, or with plain lines.
    pub fn new(use_bar: bool) -> Self {
        Progress { use_bar, bar: None }
    }

    fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| println!("{text}")),
            None => println!("{text}"),
        }
    }

    /// Removes the bar.
    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Observer for Progress {
    fn notice(&mut self, text: &str) {
        self.line(&format!("note: {text}"));
    }

    fn started(&mut self, s: &Started<'_>) {
        let m = &s.model;
        self.line(&format!(
            "model: {} layers, {} heads, {} channels, vocabulary {}: {:.2} million parameters",
            m.layers,
            m.heads,
            m.channels,
            m.vocab_size,
            m.parameter_count() as f64 / 1e6
        ));
        self.line(&format!("data: {}", s.data));
        let folder = s.folder.map_or_else(|| "no files are written".into(), |f| format!("run folder {}", f.display()));
        self.line(&format!("on {}: {:.0} MiB; {folder}", s.device, s.bytes as f64 / f64::from(1 << 20)));
        let resumed = if s.first_step > 0 { format!(", continuing after {}", s.first_step) } else { String::new() };
        self.line(&format!("training: {} steps of {} tokens{resumed}", s.steps, s.tokens_per_step));
        if self.use_bar {
            let style = "{bar:28} {pos}/{len} | {msg} | {elapsed} passed, {eta} left";
            let style = ProgressStyle::with_template(style).expect("the template is constant");
            let bar =
                ProgressBar::with_draw_target(Some(s.steps as u64), ProgressDrawTarget::stderr()).with_style(style);
            bar.set_position(s.first_step as u64);
            bar.reset_eta();
            bar.enable_steady_tick(Duration::from_millis(500));
            self.bar = Some(bar);
        }
    }

    fn step(&mut self, report: &StepReport) {
        match &self.bar {
            Some(bar) => {
                bar.set_message(format!("loss {:.3} | {:.0} tok/s", report.loss, report.tokens_per_second));
                bar.set_position(report.step as u64 + 1);
                if report.skipped {
                    self.line(&format!("step {}: an outlier; the update was skipped", report.step + 1));
                }
            }
            None => println!("{}", step_line(report)),
        }
    }

    fn validated(&mut self, step: usize, loss: f32) {
        match &self.bar {
            Some(_) => self.line(&format!("step {step:4} | val loss {loss:.4}")),
            None => println!("val loss {loss:.6}"),
        }
    }

    fn scored(&mut self, step: usize, score: &Score) {
        self.line(&format!("step {step:4} | {}", score_line(score)));
    }

    fn saved(&mut self, step: usize, model: &Path) {
        self.line(&format!("step {step:4} | wrote {}", model.display()));
    }

    fn sampled(&mut self, step: usize, text: &str) {
        self.line(&format!("\n--- sample after {step} steps ---\n{}\n---\n", text.trim()));
    }
}

/// Accuracy with its interval.
pub fn score_line(score: &Score) -> String {
    let (low, high) = score.interval();
    format!(
        "multiple choice: {}/{} = {:.4} (95% interval {low:.4} to {high:.4})",
        score.right,
        score.questions,
        score.accuracy()
    )
}

/// The last words of a run: what came of it and what to do next.
pub fn farewell(config: &TrainConfig, folder: Option<&Path>, summary: &Summary) {
    if let Some(ms) = summary.mean_ms {
        println!("total average iteration time: {ms:.6} ms");
    }
    if let Some(seconds) = summary.rested {
        println!("rested {seconds:.0} s on the way");
    }
    if let Some((first, last)) = summary.val_losses.filter(|(first, last)| first != last) {
        let falls = if last < first { "fell" } else { "rose" };
        println!("validation loss {falls} from {first:.3} to {last:.3}");
    }
    let Some(folder) = folder else { return };
    println!("the loss curve, logs and samples are in {}", folder.display());
    let Some(model) = &summary.model else { return };
    println!("\nnext:");
    println!("  tilewright sample --model {} --prompt \"She\"", model.display());
    if let Data::Text { path: None, .. } = &config.data {
        println!("  tilewright train --text your-book.txt");
        println!("  tilewright train --steps 6000 --channels 288     a better model, in more time");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> StepReport {
        StepReport {
            step: 9,
            steps: 100,
            loss: 5.25,
            loss_z: f64::NAN,
            norm: 1.5,
            norm_z: 0.25,
            lr: 3e-4,
            ms: 123.456,
            utilisation: None,
            tokens_per_second: 2048.4,
            skipped: false,
        }
    }

    #[test]
    fn a_step_line_is_llmcs() {
        let want = "step   10/100 | loss 5.250000 (+nanz)| norm 1.5000 (+0.25z)| lr 3.00e-04 | 123.46 ms | n/a MFU | 2048 tok/s";
        assert_eq!(step_line(&report()), want);
    }

    #[test]
    fn a_step_line_shows_utilisation_and_a_skipped_update() {
        let line = step_line(&StepReport { utilisation: Some(0.423), skipped: true, ..report() });
        assert!(line.contains("| 42.3% MFU |") && line.ends_with("| update skipped"), "{line}");
    }

    #[test]
    fn a_score_line_has_the_interval() {
        let line = score_line(&Score { right: 8, questions: 10 });
        assert_eq!(line, "multiple choice: 8/10 = 0.8000 (95% interval 0.4902 to 0.9433)");
    }
}
