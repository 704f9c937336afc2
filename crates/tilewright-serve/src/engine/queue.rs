//! What waits, and the order in which it runs. Plain data: no thread, no clock but the mailboxes' deadlines.
//!
//! A pack is filled twice: half of it by the requests that came first, the rest by those that have least left. So a small request is answered within a pack
//! or two whatever else waits, and a large one goes on however many small ones come. Models that have rows waiting take turns.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tilewright_models::laya::{Row, RowScores};

use super::ModelId;
use super::forecast::Waits;
use super::mailbox::{Failure, Mailbox, Scored, Spent};

/// What a request wants from a model.
#[derive(Debug)]
pub(crate) enum Work {
    /// Rows to score, each with its index in the request.
    Rows(VecDeque<(usize, Row)>),
    /// Rows to embed, all in one pass.
    Texts(Vec<Vec<u32>>),
}

impl Work {
    pub(crate) fn tokens(&self) -> usize {
        match self {
            Work::Rows(rows) => rows.iter().map(|(_, row)| row.ids.len()).sum(),
            Work::Texts(rows) => rows.iter().map(Vec::len).sum(),
        }
    }
}

/// One pass of a request.
#[derive(Debug)]
pub(crate) struct Job {
    model: ModelId,
    work: Work,
    mailbox: Arc<Mailbox>,
    /// Tokens that are not on the device yet.
    tokens: usize,
    results: Vec<Option<RowScores>>,
    missing: usize,
    number: u64,
    since: Instant,
    spent: Spent,
}

impl Job {
    pub(crate) fn new(model: ModelId, work: Work, mailbox: Arc<Mailbox>) -> Self {
        let tokens = work.tokens();
        let rows = match &work {
            Work::Rows(rows) => rows.len(),
            Work::Texts(_) => 0,
        };
        let spent = Spent { tokens, ..Spent::default() };
        let results = vec![None; rows];
        Job { model, work, mailbox, tokens, results, missing: rows, number: 0, since: Instant::now(), spent }
    }

    fn waits(&self) -> bool {
        match &self.work {
            Work::Rows(rows) => !rows.is_empty(),
            Work::Texts(rows) => !rows.is_empty(),
        }
    }
}

/// Rows of one job in a pack.
#[derive(Debug)]
pub(crate) struct Piece {
    number: u64,
    pub(crate) indices: Vec<usize>,
    pub(crate) rows: Vec<Row>,
}

/// What runs together.
#[derive(Debug)]
pub(crate) enum Pack {
    /// Rows of some jobs.
    Rows(Vec<Piece>),
    /// The texts of one.
    Texts(Piece, Vec<Vec<u32>>),
}

impl Pack {
    pub(crate) fn tokens(&self) -> usize {
        match self {
            Pack::Rows(pieces) => pieces.iter().flat_map(|p| &p.rows).map(|row| row.ids.len()).sum(),
            Pack::Texts(_, rows) => rows.iter().map(Vec::len).sum(),
        }
    }
}

/// How much waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Waiting {
    /// Passes that are not complete.
    pub jobs: usize,
    /// Tokens of rows that are not on the device yet.
    pub tokens: usize,
}

/// See the module's words.
#[derive(Debug, Default)]
pub struct Queue {
    /// In the order of their arrival.
    jobs: Vec<Job>,
    arrivals: u64,
    /// The models that had a pack, the last one last.
    served: Vec<ModelId>,
}

impl Queue {
    pub(crate) fn push(&mut self, mut job: Job) {
        self.arrivals += 1;
        job.number = self.arrivals;
        self.jobs.push(job);
    }

    /// What waits.
    pub fn waiting(&self) -> Waiting {
        Waiting { jobs: self.jobs.len(), tokens: self.jobs.iter().map(|j| j.tokens).sum() }
    }

    /// What a forecast needs to know of the jobs.
    pub(super) fn ahead(&self, now: Instant) -> Vec<Waits> {
        let left = |job: &Job| job.mailbox.deadline().saturating_duration_since(now).as_secs_f64();
        self.jobs.iter().map(|job| Waits { model: job.model, tokens: job.tokens, left: left(job) }).collect()
    }

    /// The models that had a pack, the last one last.
    pub(super) fn served(&self) -> &[ModelId] {
        &self.served
    }

    /// Whether a model has jobs.
    pub(crate) fn holds(&self, model: ModelId) -> bool {
        self.jobs.iter().any(|j| j.model == model)
    }

    /// Drops jobs that nobody waits for; how many.
    pub(crate) fn drop_over(&mut self) -> usize {
        let before = self.jobs.len();
        self.jobs.retain(|job| job.mailbox.over().is_none());
        before - self.jobs.len()
    }

    /// Whose turn it is: the model that was served longest ago, of those with rows waiting.
    pub(crate) fn next_model(&self) -> Option<ModelId> {
        let turn = |job: &&Job| self.served.iter().position(|m| *m == job.model).map_or(0, |at| at + 1);
        self.jobs.iter().filter(|job| job.waits()).min_by_key(turn).map(|job| job.model)
    }

    /// The next pack of a model that has rows waiting.
    pub(crate) fn take(&mut self, model: ModelId, budget: usize) -> Pack {
        self.served.retain(|m| *m != model);
        self.served.push(model);
        // Models that are gone take no turn.
        if self.served.len() > 64 {
            self.served.remove(0);
        }
        let of_model: Vec<usize> =
            (0..self.jobs.len()).filter(|&i| self.jobs[i].model == model && self.jobs[i].waits()).collect();
        if let Some(&first) = of_model.first()
            && let Work::Texts(rows) = &mut self.jobs[first].work
        {
            let rows = std::mem::take(rows);
            self.jobs[first].tokens = 0;
            return Pack::Texts(Piece { number: self.jobs[first].number, indices: Vec::new(), rows: Vec::new() }, rows);
        }
        let mut pieces: Vec<Piece> = Vec::new();
        let mut tokens = 0;
        for &i in &of_model {
            self.fill(i, budget, budget.div_ceil(2), &mut tokens, &mut pieces);
        }
        let mut shortest = of_model;
        shortest.sort_by_key(|&i| self.jobs[i].tokens);
        for i in shortest {
            self.fill(i, budget, budget, &mut tokens, &mut pieces);
        }
        Pack::Rows(pieces)
    }

    /// Adds rows of job `i` while the pack has less than `target` tokens and stays within `budget`. The first row of a pack is taken whatever its length.
    fn fill(&mut self, i: usize, budget: usize, target: usize, tokens: &mut usize, pieces: &mut Vec<Piece>) {
        let job = &mut self.jobs[i];
        let Work::Rows(rows) = &mut job.work else { return };
        while let Some((_, row)) = rows.front() {
            let n = row.ids.len();
            if *tokens > 0 && (*tokens >= target || *tokens + n > budget) {
                return;
            }
            let (index, row) = rows.pop_front().expect("looked at just now");
            *tokens += n;
            job.tokens -= n;
            let piece = match pieces.iter_mut().find(|p| p.number == job.number) {
                Some(piece) => piece,
                None => {
                    pieces.push(Piece { number: job.number, indices: Vec::new(), rows: Vec::new() });
                    pieces.last_mut().expect("just pushed")
                }
            };
            piece.indices.push(index);
            piece.rows.push(row);
        }
    }

    /// Takes in the results of a pack that took so long; the jobs that are complete by them, or failed.
    pub(crate) fn finish(
        &mut self,
        results: Vec<(Piece, Result<Scored, Failure>)>,
        took: Duration,
    ) -> Vec<(Arc<Mailbox>, Result<Scored, Failure>)> {
        let mut done = Vec::new();
        for (piece, result) in results {
            // A job whose client has left meanwhile is gone.
            let Some(at) = self.jobs.iter().position(|j| j.number == piece.number) else { continue };
            let job = &mut self.jobs[at];
            job.spent.compute += took;
            job.spent.packs += 1;
            let result = match result {
                Ok(Scored::Rows(scores)) => {
                    for (index, scores) in piece.indices.into_iter().zip(scores) {
                        if job.results[index].replace(scores).is_none() {
                            job.missing -= 1;
                        }
                    }
                    if job.missing > 0 {
                        continue;
                    }
                    Ok(Scored::Rows(job.results.iter_mut().filter_map(Option::take).collect()))
                }
                other => other,
            };
            let Job { mailbox, since, mut spent, .. } = self.jobs.remove(at);
            spent.queue = since.elapsed().saturating_sub(spent.compute);
            mailbox.account(spent);
            done.push((mailbox, result));
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use tilewright_models::laya::QuestionType;

    use super::*;

    fn mailbox() -> Arc<Mailbox> {
        Arc::new(Mailbox::new(Instant::now() + Duration::from_secs(60)))
    }

    fn row(tokens: usize) -> Row {
        Row { ids: vec![1; tokens], question: QuestionType::Noul, markers: vec![0], positions: None }
    }

    fn job(model: ModelId, rows: &[usize]) -> Job {
        Job::new(model, Work::Rows(rows.iter().map(|&n| row(n)).enumerate().collect()), mailbox())
    }

    fn queue(jobs: Vec<Job>) -> Queue {
        let mut queue = Queue::default();
        jobs.into_iter().for_each(|job| queue.push(job));
        queue
    }

    /// Number of job and tokens of each row, in the order of the pack.
    fn taken(pack: &Pack) -> Vec<(u64, Vec<usize>)> {
        match pack {
            Pack::Rows(pieces) => {
                pieces.iter().map(|p| (p.number, p.rows.iter().map(|r| r.ids.len()).collect())).collect()
            }
            Pack::Texts(piece, rows) => vec![(piece.number, rows.iter().map(Vec::len).collect())],
        }
    }

    fn scored(pack: Pack) -> Vec<(Piece, Result<Scored, Failure>)> {
        let Pack::Rows(pieces) = pack else { panic!("no rows") };
        let scores = |p: &Piece| {
            p.indices.iter().map(|&i| RowScores { logits: vec![i as f32], act_logits: vec![0.0] }).collect()
        };
        pieces.into_iter().map(|p| (Scored::Rows(scores(&p)), p)).map(|(s, p)| (p, Ok(s))).collect()
    }

    #[test]
    fn rows_of_different_requests_share_a_pack() {
        let mut queue = queue(vec![job(1, &[30]), job(1, &[20, 20]), job(1, &[10])]);
        assert_eq!(taken(&queue.take(1, 100)), [(1, vec![30]), (2, vec![20, 20]), (3, vec![10])]);
        assert_eq!(queue.waiting(), Waiting { jobs: 3, tokens: 0 });
    }

    #[test]
    fn half_of_a_pack_belongs_to_the_oldest_and_the_rest_to_the_shortest() {
        let mut queue = queue(vec![job(1, &[10; 50]), job(1, &[10; 50]), job(1, &[10])]);
        assert_eq!(taken(&queue.take(1, 100)), [(1, vec![10; 9]), (3, vec![10])]);
    }

    #[test]
    fn a_large_request_goes_on_however_many_small_ones_come() {
        let mut queue = queue(vec![job(1, &[10; 20])]);
        let mut packs = 0;
        while queue.jobs.iter().any(|j| j.number == 1) {
            (0..20).for_each(|_| queue.push(job(1, &[10])));
            let pack = queue.take(1, 100);
            queue.finish(scored(pack), Duration::ZERO);
            packs += 1;
        }
        assert_eq!(packs, 4, "50 of its 200 tokens a pack");
    }

    #[test]
    fn a_row_longer_than_a_pack_runs_alone() {
        let mut queue = queue(vec![job(1, &[500, 10]), job(1, &[20])]);
        assert_eq!(taken(&queue.take(1, 100)), [(1, vec![500])]);
        assert_eq!(taken(&queue.take(1, 100)), [(1, vec![10]), (2, vec![20])]);
    }

    #[test]
    fn a_row_that_does_not_fit_any_more_waits_for_the_next_pack() {
        let mut queue = queue(vec![job(1, &[60]), job(1, &[60])]);
        assert_eq!(taken(&queue.take(1, 100)), [(1, vec![60])]);
        assert_eq!(taken(&queue.take(1, 100)), [(2, vec![60])]);
        assert_eq!(queue.next_model(), None);
    }

    #[test]
    fn models_take_turns() {
        let mut queue = queue(vec![job(1, &[90, 90, 90]), job(2, &[90, 90])]);
        let turns: Vec<ModelId> = std::iter::from_fn(|| {
            let model = queue.next_model()?;
            queue.take(model, 100);
            Some(model)
        })
        .collect();
        assert_eq!(turns, [1, 2, 1, 2, 1]);
    }

    #[test]
    fn scores_come_back_in_the_order_of_the_rows_when_the_last_is_there() {
        let mut queue = queue(vec![job(1, &[60, 60, 60])]);
        for _ in 0..2 {
            let pack = queue.take(1, 100);
            assert!(queue.finish(scored(pack), Duration::ZERO).is_empty());
        }
        let pack = queue.take(1, 100);
        let done = queue.finish(scored(pack), Duration::ZERO);
        let Ok(Scored::Rows(scores)) = &done[0].1 else { panic!("{:?}", done[0].1) };
        assert_eq!(scores.iter().map(|s| s.logits[0]).collect::<Vec<_>>(), [0.0, 1.0, 2.0]);
        assert_eq!(queue.waiting(), Waiting::default());
    }

    #[test]
    fn a_request_whose_client_has_left_is_dropped_and_its_rows_under_way_are_forgotten() {
        let mut queue = queue(vec![job(1, &[60, 60]), job(1, &[30])]);
        let pack = queue.take(1, 100);
        queue.jobs[0].mailbox.cancel();
        assert_eq!(queue.drop_over(), 1);
        assert_eq!(queue.finish(scored(pack), Duration::ZERO).len(), 1, "the other one is complete");
        assert_eq!(queue.waiting(), Waiting::default());
    }

    #[test]
    fn a_request_whose_time_has_passed_is_dropped() {
        let mut queue = Queue::default();
        let late = Arc::new(Mailbox::new(Instant::now()));
        queue.push(Job::new(1, Work::Rows([(0, row(5))].into()), late));
        assert_eq!((queue.drop_over(), queue.next_model()), (1, None));
    }

    #[test]
    fn texts_run_on_their_own() {
        let mut queue = queue(vec![job(1, &[10])]);
        queue.push(Job::new(1, Work::Texts(vec![vec![1; 5], vec![1; 7]]), mailbox()));
        queue.push(job(1, &[20]));
        assert_eq!(taken(&queue.take(1, 100)), [(1, vec![10]), (3, vec![20])]);
        assert_eq!(taken(&queue.take(1, 100)), [(2, vec![5, 7])]);
    }
}
