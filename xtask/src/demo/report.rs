//! Steps as a person reads them: a number, what is done, how long it took, the receipt, what was checked.

use std::time::Instant;

use serde_json::Value;

#[derive(Default)]
pub struct Report {
    steps: u32,
}

impl Report {
    /// Runs one step and says how long it took, also when it fails.
    pub fn step<T>(&mut self, what: &str, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
        self.steps += 1;
        let began = Instant::now();
        let result = work();
        let mark = if result.is_ok() { "" } else { "  FAILED" };
        println!("{:>2}. {what}: {:.0} ms{mark}", self.steps, began.elapsed().as_secs_f64() * 1000.0);
        result
    }

    pub fn steps(&self) -> u32 {
        self.steps
    }
}

pub fn held(claim: &str) {
    println!("      ✓ {claim}");
}

/// The receipt that the daemon gave.
pub fn receipt(receipt: &Value) {
    let operation = receipt["operation"].as_str().unwrap_or("?");
    let took = receipt["tookMs"].as_u64().unwrap_or_default();
    let stopped = receipt["stoppedMs"].as_u64().map_or_else(String::new, |ms| format!(", stopped {ms} ms"));
    println!("      receipt: {operation}, {took} ms{stopped}");
    for part in ["kept", "refreshed", "shared", "dropped"] {
        let words: Vec<&str> =
            receipt[part].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        if !words.is_empty() {
            println!("        {part}: {}", words.join(", "));
        }
    }
}
