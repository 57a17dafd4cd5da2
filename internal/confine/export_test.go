package confine

// RaceDetector is raceDetector.
const RaceDetector = raceDetector
