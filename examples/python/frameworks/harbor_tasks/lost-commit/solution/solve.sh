#!/bin/sh
set -eu
cd /workspace/app
git reset --hard 'HEAD@{1}'
