"""What a training run says about itself: metrics, profiles, alerts."""
