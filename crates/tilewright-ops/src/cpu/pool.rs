//! A pool of threads that runs one indexed loop at a time. The caller works too, so a pool of one thread starts none.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// Iterations of waiting before a thread sleeps: a step of the model is hundreds of short loops, and waking a thread costs more than most
/// gaps between them.
const SPINS: usize = 20_000;

type Task<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// A loop being run. Lives on the caller's stack; `run` does not return before every worker has left it.
struct Job {
    task: Task<'static>,
    len: usize,
    next: AtomicUsize,
    panicked: AtomicBool,
}

struct Shared {
    /// Counts the loops; workers wait for it to change.
    epoch: AtomicUsize,
    job: Mutex<Option<*const Job>>,
    /// Workers that have not yet finished the current loop.
    busy: AtomicUsize,
    wake: Condvar,
    stop: AtomicBool,
}

// SAFETY: the raw pointer is only followed between the publication of a loop and the count of `busy` reaching zero, while `run` keeps the
// job alive.
unsafe impl Send for Shared {}
unsafe impl Sync for Shared {}

/// See the module's words.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl ThreadPool {
    /// A pool of `threads` threads, the caller included.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            job: Mutex::new(None),
            busy: AtomicUsize::new(0),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        let workers = (1..threads.max(1))
            .map(|worker| {
                let shared = shared.clone();
                std::thread::Builder::new()
                    .name(format!("tilewright-{worker}"))
                    .spawn(move || work(&shared, worker))
                    .expect("the system refused a thread; use fewer with TILEWRIGHT_THREADS")
            })
            .collect();
        ThreadPool { shared, workers }
    }

    /// The number of threads, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(index, worker)` for every index below `len`, each exactly once, on any thread; `worker < self.threads()` tells which, and
    /// no two tasks run at once with the same one. Which thread takes an index is not fixed: results must not depend on it.
    ///
    /// # Panics
    /// When a task panics (after all threads have stopped), or when called from inside a task.
    pub fn run(&self, len: usize, task: &(dyn Fn(usize, usize) + Sync)) {
        if self.workers.is_empty() || len <= 1 {
            for index in 0..len {
                task(index, 0);
            }
            return;
        }
        // SAFETY: only the lifetime is erased; `run` waits below until no worker uses the job.
        let task: Task<'static> = unsafe { std::mem::transmute::<Task<'_>, Task<'static>>(task) };
        let job = Job { task, len, next: AtomicUsize::new(0), panicked: AtomicBool::new(false) };
        {
            let mut slot = self.shared.job.lock().expect("a pool's lock is held only for assignments");
            assert!(slot.is_none(), "ThreadPool::run called from inside a task");
            *slot = Some(&raw const job);
            self.shared.busy.store(self.workers.len(), Ordering::Release);
            self.shared.epoch.fetch_add(1, Ordering::Release);
        }
        self.shared.wake.notify_all();
        drain(&job, 0);
        let mut spins = 0;
        while self.shared.busy.load(Ordering::Acquire) > 0 {
            wait(&mut spins);
        }
        *self.shared.job.lock().expect("a pool's lock is held only for assignments") = None;
        assert!(!job.panicked.load(Ordering::Acquire), "a task of the thread pool panicked; its message is above");
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        {
            let _guard = self.shared.job.lock();
            self.shared.epoch.fetch_add(1, Ordering::Release);
        }
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

fn drain(job: &Job, worker: usize) {
    loop {
        let index = job.next.fetch_add(1, Ordering::Relaxed);
        if index >= job.len || job.panicked.load(Ordering::Relaxed) {
            return;
        }
        if catch_unwind(AssertUnwindSafe(|| (job.task)(index, worker))).is_err() {
            job.panicked.store(true, Ordering::Release);
        }
    }
}

fn wait(spins: &mut usize) {
    *spins += 1;
    if *spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
}

fn work(shared: &Shared, worker: usize) {
    let mut seen = 0;
    loop {
        let mut spins = 0;
        while shared.epoch.load(Ordering::Acquire) == seen && spins < SPINS {
            spins += 1;
            std::hint::spin_loop();
        }
        let job = {
            let mut slot = shared.job.lock().expect("a pool's lock is held only for assignments");
            while shared.epoch.load(Ordering::Acquire) == seen {
                slot = shared.wake.wait(slot).expect("a pool's lock is held only for assignments");
            }
            seen = shared.epoch.load(Ordering::Acquire);
            *slot
        };
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        if let Some(job) = job {
            // SAFETY: `run` published the job and waits for `busy` before it leaves.
            drain(unsafe { &*job }, worker);
            shared.busy.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_index_runs_exactly_once() {
        for threads in [1, 2, 3, 8] {
            let pool = ThreadPool::new(threads);
            for len in [0, 1, 2, 7, 1000] {
                let counts: Vec<AtomicU32> = (0..len).map(|_| AtomicU32::new(0)).collect();
                pool.run(len, &|i, w| {
                    assert!(w < threads);
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{threads} threads, {len} indices");
            }
        }
    }

    #[test]
    fn many_short_loops_in_a_row() {
        let pool = ThreadPool::new(4);
        let total = AtomicUsize::new(0);
        for _ in 0..5_000 {
            pool.run(5, &|i, _| {
                total.fetch_add(i, Ordering::Relaxed);
            });
        }
        assert_eq!(total.into_inner(), 5_000 * 10);
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_pool_survives() {
        let pool = ThreadPool::new(2);
        let result = catch_unwind(AssertUnwindSafe(|| pool.run(8, &|i, _| assert!(i != 5, "planned"))));
        assert!(result.is_err());
        let n = AtomicUsize::new(0);
        pool.run(8, &|_, _| {
            n.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(n.into_inner(), 8);
    }
}
