//! `tilewright decide demo`: a checkpoint that loads and answers, and knows nothing.

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use tilewright_models::laya::demo::{self, DemoShape};

/// Command line of `decide demo`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The folder to make
    #[arg(default_value = "laya-demo", value_name = "DIR")]
    dir: PathBuf,
    /// Its sizes
    #[arg(long, value_enum, default_value_t = Shape::Tiny)]
    shape: Shape,
    /// Seed of the weights
    #[arg(long, default_value_t = 1337)]
    seed: u32,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Shape {
    /// 0.3 million parameters: written and loaded at once
    Tiny,
    /// The English checkpoint's: ModernBERT-large, 847 MB
    Large,
    /// The multilingual checkpoint's: mmBERT-base, 644 MB
    MmbertBase,
}

/// Runs the subcommand.
pub fn run(args: &Args) -> Result<()> {
    let shape = match args.shape {
        Shape::Tiny => DemoShape::Tiny,
        Shape::Large => DemoShape::Large,
        Shape::MmbertBase => DemoShape::MmbertBase,
    };
    demo::write(&args.dir, shape, args.seed)?;
    let dir = args.dir.display();
    println!("wrote {dir}, a Laya checkpoint with random weights: its answers mean nothing");
    println!("\nnext:");
    println!("  tilewright decide --model {dir} --preset triage --state \"My card was charged twice, please help\"");
    println!("  tilewright inspect {dir}");
    Ok(())
}
