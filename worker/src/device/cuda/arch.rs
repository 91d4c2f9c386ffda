//! Architectures that kernels are compiled for.

use std::fmt;

/// A GPU architecture: `sm_80`, `sm_90a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    /// Compute capability.
    major: u32,
    minor: u32,
    /// With the instructions that only this very architecture has (`wgmma`, tensor memory).
    specific: bool,
}

impl Arch {
    /// Ampere: A100.
    pub const SM_80: Self = Self::portable(8, 0);
    /// Kernels are written for cards from this one on: bf16 on tensor cores, copies that do not hold up their thread.
    pub const OLDEST: Self = Self::SM_80;
    /// Hopper: H100, H200.
    pub const SM_90A: Self = Self::of_capability(9, 0);
    /// Blackwell: B200.
    pub const SM_100: Self = Self::portable(10, 0);

    /// Without instructions that later ones lack.
    #[must_use]
    pub const fn portable(major: u32, minor: u32) -> Self {
        Self {
            major,
            minor,
            specific: false,
        }
    }

    /// What a card of this compute capability is compiled for.
    #[must_use]
    pub const fn of_capability(major: u32, minor: u32) -> Self {
        Self {
            major,
            minor,
            // Kernels have a version for Hopper's own instructions; none for those of others.
            specific: major == 9 && minor == 0,
        }
    }

    /// `80`, `90`, `100`: how NVRTC numbers it.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.major * 10 + self.minor
    }

    /// The newest of `supported` (numbers as NVRTC's) whose code runs on this one: itself, or an earlier one of
    /// the same major number.
    #[must_use]
    pub fn best_of(self, supported: &[u32]) -> Option<Self> {
        if supported.contains(&self.number()) {
            return Some(self);
        }
        let family = supported
            .iter()
            .filter(|n| **n / 10 == self.major && **n < self.number());
        family.max().map(|n| Self::portable(n / 10, n % 10))
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = if self.specific { "a" } else { "" };
        write!(f, "sm_{}{suffix}", self.number())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let names = [Arch::SM_80, Arch::SM_90A, Arch::SM_100].map(|arch| arch.to_string());
        assert_eq!(names, ["sm_80", "sm_90a", "sm_100"]);
        assert_eq!(Arch::of_capability(8, 9).to_string(), "sm_89");
    }

    #[test]
    fn an_older_compiler_serves_a_newer_card_of_the_same_family() {
        let supported = [75, 80, 86, 90];
        let best = |major, minor| Arch::of_capability(major, minor).best_of(&supported);
        assert_eq!(best(9, 0), Some(Arch::SM_90A));
        assert_eq!(best(8, 9), Some(Arch::portable(8, 6)));
        assert_eq!(best(10, 0), None);
    }
}
