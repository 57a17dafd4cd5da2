set -eu
git init -q -b main .
git config user.name Ada
git config user.email ada@example.com
echo "limit = 10" >settings
git add .
git commit -q -m "a limit"
echo "limit = 20" >settings
git commit -q -a -m "twice the limit"
git reset -q --hard HEAD~1
