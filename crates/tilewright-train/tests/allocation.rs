//! The heap does not grow while training: live bytes after each step are those after the third.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering};

use tilewright_ops::Device;
use tilewright_train::config::{Data, Model, TrainConfig};
use tilewright_train::eval::Score;
use tilewright_train::run::{Observer, RunOptions, Started, StepReport, train};

struct Counting;

static LIVE: AtomicIsize = AtomicIsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as isize, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

struct Watch {
    live: [isize; 60],
}

impl Observer for Watch {
    fn notice(&mut self, _: &str) {}
    fn started(&mut self, _: &Started<'_>) {}
    fn step(&mut self, report: &StepReport) {
        self.live[report.step] = LIVE.load(Ordering::Relaxed);
    }
    fn validated(&mut self, _: usize, _: f32) {}
    fn scored(&mut self, _: usize, _: &Score) {}
    fn saved(&mut self, _: usize, _: &Path) {}
    fn sampled(&mut self, _: usize, _: &str) {}
}

#[test]
fn live_bytes_are_constant_after_the_second_step() {
    let config = TrainConfig {
        data: Data::Text { path: None, vocab_size: 300 },
        model: Model::Sized { layers: 2, heads: 2, channels: 32 },
        batch: 2,
        seq_len: 16,
        steps: Some(60),
        val_every: 20,
        sample_every: 0,
        ..TrainConfig::for_text(None)
    };
    let mut watch = Watch { live: [0; 60] };
    let device = Device::cpu_with_threads(2);
    train(&config, &RunOptions::default(), &device, &AtomicBool::new(false), &mut watch).unwrap();
    let after = watch.live[2];
    for (step, live) in watch.live.iter().enumerate().skip(2) {
        // The reading thread may hold a small message at the moment of the count.
        assert!((live - after).abs() < 1024, "step {step}: {live} bytes live, {after} after the second step");
    }
}
