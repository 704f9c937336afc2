//! How long what waits will take: the pace of each model, and the order of the queue played ahead.
//!
//! A request is let in if it will be answered in its time and makes no other that was let in miss its own. The forecast is the queue's own rule applied to
//! numbers of tokens, so it knows that a short request passes long ones. It is wrong by as much as packs differ from those before; [`MARGIN`] is for that.

use std::time::{Duration, Instant};

use super::ModelId;

/// A pack weighs so much less in the pace with each that follows it: the last eight or so count.
const KEEP: f64 = 0.875;

/// How much slower than the mean of late a pack is expected to be: by the mean alone every second request at the edge would be late.
const MARGIN: f64 = 1.25;

/// What a model on its own would have to be late by to be refused by an idle device. The pace may be of a worse hour.
const IDLE_SLACK: f64 = 2.0;

/// When an idle device no longer believes its pace at all.
const STALE: Duration = Duration::from_secs(30);

/// Seconds a token, of the last packs of a model.
#[derive(Clone, Debug, Default)]
pub(super) struct Pace {
    tokens: f64,
    seconds: f64,
    seen: usize,
    last: Option<Instant>,
}

impl Pace {
    /// Takes in a pack.
    pub(super) fn observe(&mut self, tokens: usize, took: Duration) {
        self.tokens = self.tokens * KEEP + tokens as f64;
        self.seconds = self.seconds * KEEP + took.as_secs_f64();
        self.seen = self.seen.saturating_add(tokens);
        self.last = Some(Instant::now());
    }

    /// Expected seconds a token; none before `enough` tokens were seen, as first packs are slow and small ones say little about full ones.
    pub(super) fn per_token(&self, enough: usize) -> Option<f64> {
        (self.seen >= enough && self.tokens > 0.0).then(|| self.seconds / self.tokens * MARGIN)
    }

    fn is_stale(&self) -> bool {
        self.last.is_none_or(|last| last.elapsed() > STALE)
    }

    /// Whether an idle device should try a request that would take `own` seconds of the `left` that it has: what it measures then is the new pace.
    pub(super) fn may_try(&self, own: f64, left: f64) -> bool {
        own <= IDLE_SLACK * left || self.is_stale()
    }
}

/// A request in the queue, as far as a forecast looks at it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waits {
    pub(super) model: ModelId,
    /// Not on the device yet.
    pub(super) tokens: usize,
    /// Seconds until its time is over.
    pub(super) left: f64,
}

/// The state from which a forecast starts.
pub(super) struct Outlook<'a> {
    /// Seconds until the device is free.
    pub(super) free: f64,
    /// In the order of their arrival.
    pub(super) waiting: &'a [Waits],
    /// The models that had a pack, the last one last.
    pub(super) served: &'a [ModelId],
    /// Tokens of a pack.
    pub(super) budget: usize,
    /// Seconds a token of a model.
    pub(super) pace: &'a dyn Fn(ModelId) -> f64,
}

impl Outlook<'_> {
    /// When each request will be done, in seconds from now. Those that are not by `horizon` get infinity.
    fn done(&self, horizon: f64) -> Vec<f64> {
        let mut now = self.free;
        let mut left: Vec<usize> = self.waiting.iter().map(|w| w.tokens).collect();
        let mut done: Vec<f64> = left.iter().map(|&n| if n == 0 { now } else { f64::INFINITY }).collect();
        let mut served = self.served.to_vec();
        while now <= horizon {
            let turn = |i: &usize| served.iter().position(|m| *m == self.waiting[*i].model).map_or(0, |at| at + 1);
            let Some(next) = (0..left.len()).filter(|&i| left[i] > 0).min_by_key(turn) else { break };
            let model = self.waiting[next].model;
            served.retain(|m| *m != model);
            served.push(model);
            let mut order: Vec<usize> =
                (0..left.len()).filter(|&i| self.waiting[i].model == model && left[i] > 0).collect();
            let mut taken = 0;
            let mut give = |i: usize, target: usize, left: &mut [usize]| {
                let n = left[i].min(target.saturating_sub(taken));
                left[i] -= n;
                taken += n;
            };
            order.iter().for_each(|&i| give(i, self.budget.div_ceil(2), &mut left));
            order.sort_by_key(|&i| left[i]);
            order.iter().for_each(|&i| give(i, self.budget, &mut left));
            now += taken as f64 * (self.pace)(model);
            order.iter().filter(|&&i| left[i] == 0).for_each(|&i| done[i] = now);
        }
        done
    }

    fn horizon(&self) -> f64 {
        self.waiting.iter().map(|w| w.left).fold(0.0, f64::max)
    }

    /// Seconds until all of it is done.
    pub(super) fn total(&self) -> f64 {
        self.free + self.waiting.iter().map(|w| w.tokens as f64 * (self.pace)(w.model)).sum::<f64>()
    }

    /// Whether the last of the waiting, who has just come, should be turned away, and then what to tell him.
    pub(super) fn refusal(&self) -> Option<Late> {
        let (newest, others) = self.waiting.split_last()?;
        let horizon = self.horizon();
        let with = self.done(horizon);
        let late = |done: f64, left: f64| (done > left).then(|| done.min(self.total()) - left);
        let own = late(with[others.len()], newest.left);
        let excess = own.or_else(|| {
            let without = Outlook { waiting: others, ..*self }.done(horizon);
            let suffers = |i: usize| {
                let left = others[i].left;
                if without[i] <= left { late(with[i], left) } else { None }
            };
            (0..others.len()).filter_map(suffers).max_by(f64::total_cmp)
        })?;
        Some(Late {
            alone: newest.tokens as f64 * (self.pace)(newest.model),
            done: with[others.len()].min(self.total()),
            left: newest.left,
            excess: excess.max(0.0),
        })
    }
}

/// Why a request was turned away, in seconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Late {
    /// What it would take by itself.
    pub alone: f64,
    /// When it would have been done.
    pub done: f64,
    /// What it has.
    pub left: f64,
    /// By how much it, or one that was let in before, would have been late: so much has to be done first.
    pub excess: f64,
}

impl Late {
    /// When to come back: when so much is done that it would have fitted.
    pub fn retry(&self) -> Duration {
        Duration::from_secs_f64(self.excess.clamp(1.0, 3600.0))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tilewright_models::laya::{QuestionType, Row, RowScores};

    use super::super::mailbox::{Mailbox, Scored};
    use super::super::queue::{Job, Pack, Queue, Work};
    use super::*;

    const PACE: f64 = 0.01;

    fn waits(tokens: usize, left: f64) -> Waits {
        Waits { model: 1, tokens, left }
    }

    fn outlook<'a>(free: f64, waiting: &'a [Waits], pace: &'a dyn Fn(ModelId) -> f64) -> Outlook<'a> {
        Outlook { free, waiting, served: &[], budget: 100, pace }
    }

    fn refusal(free: f64, waiting: &[Waits]) -> Option<Late> {
        outlook(free, waiting, &|_| PACE).refusal()
    }

    /// What the queue itself does with rows of one token: when each job is done.
    fn played(jobs: &[(ModelId, usize)], budget: usize) -> Vec<f64> {
        let mut queue = Queue::default();
        let row = Row { ids: vec![1], question: QuestionType::Noul, markers: vec![0], positions: None };
        let mailboxes: Vec<Arc<Mailbox>> =
            jobs.iter().map(|_| Arc::new(Mailbox::new(Instant::now() + Duration::from_secs(600)))).collect();
        for ((model, tokens), mailbox) in jobs.iter().zip(&mailboxes) {
            let rows = (0..*tokens).map(|i| (i, row.clone())).collect();
            queue.push(Job::new(*model, Work::Rows(rows), mailbox.clone()));
        }
        let (mut now, mut done) = (0.0, vec![f64::INFINITY; jobs.len()]);
        while let Some(model) = queue.next_model() {
            let Pack::Rows(pieces) = queue.take(model, budget) else { panic!("rows") };
            now += pieces.iter().map(|p| p.rows.len()).sum::<usize>() as f64 * PACE;
            let scores = |n: usize| Scored::Rows(vec![RowScores { logits: vec![0.0], act_logits: vec![0.0] }; n]);
            let results = pieces.into_iter().map(|p| (scores(p.rows.len()), p)).map(|(s, p)| (p, Ok(s))).collect();
            for (mailbox, _) in queue.finish(results, Duration::ZERO) {
                done[mailboxes.iter().position(|m| Arc::ptr_eq(m, &mailbox)).unwrap()] = now;
            }
        }
        done
    }

    #[test]
    fn the_forecast_is_what_the_queue_does() {
        let mut seed = 7u64;
        let mut random = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % n
        };
        for case in 0..200 {
            let jobs: Vec<(ModelId, usize)> =
                (0..1 + random(12)).map(|_| (1 + random(3), 1 + random(400) as usize)).collect();
            let waiting: Vec<Waits> = jobs.iter().map(|&(model, tokens)| Waits { model, tokens, left: 0.0 }).collect();
            let forecast = outlook(0.0, &waiting, &|_| PACE).done(f64::INFINITY);
            for (i, (got, want)) in forecast.iter().zip(played(&jobs, 100)).enumerate() {
                assert!((got - want).abs() < 1e-9, "case {case}, job {i} of {jobs:?}: {got}, played {want}");
            }
        }
    }

    #[test]
    fn who_fits_is_let_in_and_who_does_not_is_told_by_how_much() {
        assert_eq!(refusal(0.0, &[waits(100, 1.5)]), None);
        assert_eq!(refusal(0.0, &[waits(100, 3.0), waits(100, 2.1)]), None);
        let late = refusal(1.0, &[waits(100, 9.0), waits(300, 4.0)]).unwrap();
        assert!((late.done - 5.0).abs() < 1e-9 && (late.alone - 3.0).abs() < 1e-9, "{late:?}");
        assert!((late.excess - 1.0).abs() < 1e-9 && late.retry() == Duration::from_secs(1), "{late:?}");
    }

    #[test]
    fn a_short_request_passes_long_ones_and_is_let_in() {
        let mut waiting = vec![waits(5_000, 60.0); 2];
        waiting.push(waits(20, 3.0));
        assert_eq!(refusal(0.0, &waiting), None);
        waiting[2].tokens = 500;
        assert!(refusal(0.0, &waiting).is_some());
    }

    #[test]
    fn who_would_make_another_late_is_turned_away() {
        // By itself the second is done after a second, and the first then only after eleven.
        let waiting = [waits(1_000, 10.5), waits(100, 5.0)];
        let late = refusal(0.0, &waiting).unwrap();
        assert!(late.done < 5.0 && (late.excess - 0.5).abs() < 1e-9, "{late:?}");
        // One that is late in any case is no reason.
        assert_eq!(refusal(0.0, &[waits(1_000, 5.0), waits(100, 5.0)]), None);
    }

    #[test]
    fn models_take_turns_in_a_forecast_too() {
        let mut waiting = vec![waits(1_000, 60.0)];
        waiting.push(Waits { model: 2, tokens: 100, left: 3.0 });
        assert_eq!(refusal(0.0, &waiting), None, "not behind the ten packs of another model");
    }

    #[test]
    fn a_pace_is_known_after_enough_tokens_and_follows_the_device() {
        let mut pace = Pace::default();
        pace.observe(500, Duration::from_secs(5));
        assert_eq!(pace.per_token(1_000), None);
        pace.observe(500, Duration::from_secs(5));
        assert!((pace.per_token(1_000).unwrap() - 0.01 * MARGIN).abs() < 1e-6);
        (0..40).for_each(|_| pace.observe(1_000, Duration::from_secs(1)));
        assert!((pace.per_token(1_000).unwrap() / (0.001 * MARGIN) - 1.0).abs() < 0.05);
        assert!(pace.may_try(1.9, 1.0) && !pace.may_try(2.1, 1.0));
        pace.last = Instant::now().checked_sub(2 * STALE);
        assert!(pace.may_try(1e9, 1.0), "an old pace is not believed");
    }
}
