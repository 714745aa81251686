//! Layers: sparse files whose holes mean "look below".
