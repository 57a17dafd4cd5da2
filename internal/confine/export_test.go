package confine

// RaceDetector is raceDetector.
const RaceDetector = raceDetector

// Remember is remember.
var Remember = remember
