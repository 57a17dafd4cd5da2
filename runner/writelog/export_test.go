package writelog

import "os"

// SwapFile appends to another file from now on, and returns the one of before.
func (l *Log) SwapFile(f *os.File) *os.File {
	l.fileMu.Lock()
	defer l.fileMu.Unlock()
	old := l.file
	l.file = f
	return old
}

// HoldDisk stands for a disk that does not answer, until release is called.
func (l *Log) HoldDisk() (release func()) {
	l.fileMu.Lock()
	return l.fileMu.Unlock
}
