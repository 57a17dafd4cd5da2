#!/bin/sh
cd /workspace/app || exit 1
subjects=$(git log --format=%s main | tr '\n' ';')
if [ "$subjects" = "twice the limit;a limit;" ] && [ "$(cat settings)" = "limit = 20" ] && [ -z "$(git status --porcelain)" ]; then
	echo 1
else
	echo 0
fi >/logs/verifier/reward.txt
