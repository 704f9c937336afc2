//! llm.c's small generator for sampling and for the seeds of stochastic rounding.

/// xorshift*: 64 bits of state, written to checkpoints as they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct XorShift {
    state: u64,
}

impl XorShift {
    /// A generator at a state; llm.c seeds are small numbers used directly. State 0 would repeat 0 for ever, so it is taken as 1.
    pub const fn new(state: u64) -> Self {
        XorShift { state: if state == 0 { 1 } else { state } }
    }

    /// The state that [`new`](Self::new) continues from.
    pub const fn state(&self) -> u64 {
        self.state
    }

    /// The next 32 bits.
    pub const fn random_u32(&mut self) -> u32 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        (self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    /// A float in `[0, 1)`: the upper 24 bits of one draw.
    pub const fn random_f32(&mut self) -> f32 {
        (self.random_u32() >> 8) as f32 / (1 << 24) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generator_continues_from_its_state() {
        let mut a = XorShift::new(13_371_337);
        a.random_u32();
        let mut b = XorShift::new(a.state());
        assert_eq!(a.random_u32(), b.random_u32());
    }

    #[test]
    fn state_zero_does_not_get_stuck() {
        let mut rng = XorShift::new(0);
        assert_ne!(rng.random_u32(), rng.random_u32());
    }
}
