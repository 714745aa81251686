//! The KVM VM.
